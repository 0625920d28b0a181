"""Errors told: the user's lines, the module and what it got, and nothing of ours but a count."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx.losses import Logits
from phalanx.traces import Traced, described, expected, explain, folded, whole
from tests.tasks import Digits


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.up(x)
        return self.down(x)


class Adding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :2]
        return x + torch.ones(5)


class Picky(Digits):
    """Its inputs do not fit."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), Block() if self.mistake != "own" else Adding(), nn.Linear(4, 3))

    def inputs(self, batch: dict[str, Any]) -> Any:
        return (
            batch["x"].long() if self.mistake == "dtype" else (batch["x"],) * 2 if self.mistake == "two" else batch["x"]
        )

    def loss(self, output: Tensor, batch: dict[str, Any]) -> Any:
        if self.mistake == "loss":
            output = torch.ones(len(output), 3, requires_grad=True)
            return phalanx.losses.cross_entropy(output, batch["y"] + 4)
        return super().loss(output, batch)


@pytest.mark.parametrize(
    ("mistake", "note"),
    [
        ("", r"1.down (Linear) got float32 [8, 8]; it expects float32 [..., 4]"),
        ("own", "1 (Adding) got float32 [8, 4]; it expects what forward(x: 'Tensor') says"),
        ("two", "the model (Sequential) got float32 [8, 4], float32 [8, 4]; it expects what forward(input) says"),
    ],
)
def test_the_module_is_named_with_what_it_got_and_expects(mistake: str, note: str) -> None:
    with phalanx.Engine(Picky(mistake=mistake), device="cpu") as engine:
        batch = next(engine.batches())
        with pytest.raises((RuntimeError, TypeError)) as caught:
            engine.step(batch)
    assert caught.value.__notes__[0] == note
    made = [text for text in caught.value.__notes__ if text.startswith("the model is made at tests/test_traces.py:")]
    assert len(made) == (mistake == "two"), "told where no line of the user's is"
    lines = folded(caught.value).splitlines()
    assert lines[0].strip() == note
    if mistake != "two":  # whose call is ours
        assert __file__ in lines[1], "the user's innermost line comes first"
    ours = next(line for line in lines if "…" in line)
    assert re.fullmatch(r"  … \d+ lines of (torch and phalanx|phalanx and torch)", ours)
    assert len(lines) < 11
    assert "Traceback" in whole(caught.value)
    assert "train/step.py" in whole(caught.value)


def test_the_method_of_the_task_is_named_with_what_it_got() -> None:
    class Off(Digits):
        def loss(self, output: Tensor, batch: dict[str, Any]) -> Any:
            return phalanx.losses.cross_entropy(output, batch["y"] + 4)

    with phalanx.Engine(Off(), device="cpu") as engine:
        batch = next(engine.batches())
        with pytest.raises(IndexError) as caught:
            engine.step(batch)
    (note,) = caught.value.__notes__
    assert note.startswith("Off.loss got output float32 [8, 3], batch {x: float32 [8, 4], y: int64 [8] from ")


def test_what_is_refused_in_words_needs_no_note() -> None:
    error = phalanx.WrongUse("wrong. Do otherwise.")
    explain(error, nn.Linear(1, 1), Digits())
    assert not hasattr(error, "__notes__")


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Linear(5, 2), "float32 [..., 5]"),
        (nn.Conv2d(3, 8, 3).double(), "float64 [batch, 3, height, width]"),
        (nn.Conv1d(2, 8, 3), "float32 [batch, 2, length]"),
        (nn.Embedding(7, 2), "whole numbers from 0 to 6"),
        (nn.LayerNorm((4, 6)), "float32 [..., 4, 6]"),
        (nn.BatchNorm2d(9), "float32 [batch, 9, ...]"),
        (nn.GroupNorm(2, 6), "float32 [batch, 6, ...]"),
        (nn.LSTM(3, 4, batch_first=True), "float32 [batch, time, 3]"),
        (nn.MultiheadAttention(8, 2), "float32 [time, batch, 8]"),
    ],
)
def test_what_modules_expect(module: nn.Module, words: str) -> None:
    assert expected(module) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.ones(2, 3, dtype=torch.bfloat16), "bfloat16 [2, 3]"),
        (torch.tensor([3, 9]), "int64 [2] from 3 to 9"),
        (torch.tensor([], dtype=torch.long), "int64 [0]"),
        (torch.ones(2).numpy(), "float32 [2]"),
        ({"x": torch.ones(1), "y": [1, 2]}, "{x: float32 [1], y: [1, 2]}"),
        ((1, "a", None), "(1, text, None)"),
        (list(range(30)), "a list of 30, the first 0"),
        (object(), "a object"),
    ],
)
def test_values_in_words(value: Any, words: str) -> None:
    assert described(value) == words


def test_what_another_process_told_is_kept() -> None:
    error = pickle.loads(pickle.dumps(Traced("sample 3 cannot be read: KeyError: 'x'", "  lines", "all")))
    assert (str(error), folded(error), whole(error)) == ("sample 3 cannot be read: KeyError: 'x'", "  lines", "all")


def test_what_cannot_be_described_does_not_hide_the_error() -> None:
    assert described(torch.ones(2, dtype=torch.uint16)) == "uint16 [2]"
    lazy = Logits(torch.ones(2, 3), torch.ones(5, 3))
    assert described(lazy) == "logits [2, 5]"
    assert lazy.lazy
