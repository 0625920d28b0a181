"""What is gathered of held-out samples is whole and in order under every layout, and bad input is refused in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import phalanx
from phalanx import Layout
from phalanx.train import collecting
from phalanx.train.collecting import numbers
from phalanx.train.evaluate import evaluate
from tests.parity import HostileLanguage, Mixture, Sentences
from tests.ranks import Ranks
from tests.tasks import Digits

HELD = 13
SHORT = (5, 3)
"""Samples of a last batch: on one rank, and on the second of two."""


class Whole:
    """Sentences of one length, so that what is gathered of their positions stacks."""

    def __len__(self) -> int:
        return HELD

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = Sentences(HELD)[index + 4 - index % 7]
        return {name: value[:3].add(index * (name == "tokens")) % 37 for name, value in sample.items()}


class Read(HostileLanguage):
    """Gathers each sentence's own loss, its last position's logits, flags and words."""

    def held_out(self) -> Whole:
        return Whole()

    def evaluate(self, output: Any, batch: dict[str, Tensor]) -> dict[str, Any]:
        logits = output.tensor()
        each = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten() % 37, reduction="none")
        return {
            "loss": self.loss(output, batch),
            "each": each.view(len(logits), -1).mean(1),
            "last": logits[:, -1],
            "even": batch["tokens"][:, 0] % 2 == 0,
            "words": [f"{row.tolist()} ümlaut" for row in batch["tokens"]],
            "boxes": [row[: int(tokens[0]) % 4] for row, tokens in zip(logits, batch["tokens"], strict=True)],
            "classes": [tokens[: int(tokens[0]) % 3] for tokens in batch["tokens"]],
        }

    def summarise(self, gathered: dict[str, Any]) -> dict[str, float]:
        return {
            "median": gathered["each"].median(),
            "even": int(gathered["even"].sum()),
            "length": sum(map(len, gathered["words"])),
            "boxes": sum(row.sum() for row in gathered["boxes"]),
        }


class ReadMixture(Read, Mixture):
    pass


def gather(kind: type[HostileLanguage], layout: str, layers: int = 2) -> tuple[Any, dict[str, float]]:
    with phalanx.Engine(kind(steps=1, global_batch=5, layers=layers), Layout.parse(layout), device="cpu") as engine:
        for batch in engine.batches():
            engine.step(batch)
        assert engine.held_out is not None
        found = evaluate(engine, engine.held_out)
        assert engine.spread.model.training
        return found.gathered, found.results()


LAYOUTS = (
    ("dp=2", Read, 2), ("dp=4,micro_batch=1", Read, 2), ("dp=2,fsdp=2,zero=1", Read, 2), ("fsdp=4", Read, 2),
    ("tp=2", Read, 2), ("dp=2,tp=2", Read, 2), ("cp=2", Read, 2), ("dp=2,cp=2,cp_kind=ulysses", Read, 2),
    ("pp=2,micro_batch=1", Read, 2), ("fsdp=2,pp=2,micro_batch=1,schedule=interleaved", Read, 4),
    ("fsdp=2,ep=2", ReadMixture, 2), ("dp=2,exact=4", Read, 2),
)  # fmt: skip


@pytest.mark.parametrize(("layout", "kind", "layers"), LAYOUTS)
def test_every_sample_once_and_in_order(ranks: Ranks, layout: str, kind: type[Read], layers: int) -> None:
    one, want = gather(kind, "dp=1", layers)
    assert len(one["each"]) == len(one["words"]) == HELD
    assert [eval(text.removesuffix(" ümlaut")) for text in one["words"]] == [
        Whole()[i]["tokens"].tolist() for i in range(HELD)
    ]
    found = ranks(Layout.parse(layout).world, gather, kind, layout, layers)
    assert all(results == found[0][1] for _, results in found)
    assert found[0][1] == pytest.approx(want, rel=1e-9)
    gathered = found[0][0]
    assert all(rest is None for rest, _ in found[1:])
    assert gathered["words"] == one["words"]
    assert torch.equal(gathered["even"], one["even"])
    for name in ("each", "last"):
        assert gathered[name].dtype == torch.float64
        torch.testing.assert_close(gathered[name], one[name], rtol=1e-9, atol=1e-12)
    assert [len(row) for row in one["boxes"]] == [int(Whole()[i]["tokens"][0]) % 4 for i in range(HELD)]
    for name in ("boxes", "classes"):  # rows of samples that differ in number, some of none
        torch.testing.assert_close(gathered[name], one[name], rtol=1e-9, atol=1e-12)


def in_small_messages(layout: str) -> Any:
    before, collecting.MESSAGE_BYTES = collecting.MESSAGE_BYTES, 100
    try:
        return gather(Read, layout)
    finally:
        collecting.MESSAGE_BYTES = before


def test_messages_have_a_bounded_size(ranks: Ranks) -> None:
    found, want = ranks(2, in_small_messages, "dp=2"), ranks(2, gather, Read, "dp=2")
    assert found[0][1] == want[0][1]
    assert found[0][0]["words"] == want[0][0]["words"]
    assert torch.equal(found[0][0]["last"], want[0][0]["last"])
    torch.testing.assert_close(found[0][0]["boxes"], want[0][0]["boxes"], rtol=0, atol=0)


@dataclass
class Wrong(Digits):
    kind: str = ""

    def evaluate(self, output: Tensor, batch: dict[str, Any]) -> Any:
        wide = output if len(output) not in SHORT else output[:, :2]
        unlike = [row.view(1, -1) for row in wide]
        return {
            "sum": {"x": output.sum(0)}, "missing": {"x": output, "y": output}, "few": {"x": ["a"]},
            "mixed": {"x": [1, "a"] * 4}, "uneven": {"x": wide}, "twice": {"auc": phalanx.Loss(1, 1), "x": output},
            "scalars": {"x": [*output[:, 0]]}, "unlike": {"x": unlike},
            "sometimes": {} if len(output) in SHORT else {"x": output},
        }.get(self.kind, {"x": output})  # fmt: skip


class Summarised(Wrong):
    def summarise(self, gathered: dict[str, Any]) -> Any:
        if self.kind == "fails" or (self.kind == "needs all" and len(gathered["x"]) < 13):
            raise KeyError("no such class")
        return {
            "no dict": 0.5, "a row": {"auc": torch.ones(3)}, "a word": {"auc": "high"}, "no name": {3: 1.0},
        }.get(self.kind, {"auc": torch.tensor(0.5)})  # fmt: skip


MISTAKES = {
    "sum": (Summarised, r"for 'x' a tensor of shape \(3,\) for 8 samples. Return one row a sample"),
    "missing": (Wrong, r"gives a tensor or a list for 'x', 'y', and there is no summarise\(\)"),
    "few": (Summarised, "a list of 1 for 8 samples"),
    "mixed": (
        Summarised,
        "a list of int, str. Return a tensor with a row a sample, or a list with a string or a tensor",
    ),
    "scalars": (Summarised, r"a list of tensor of shape \(\)\. Return a tensor with a row a sample"),
    "uneven": (
        Summarised,
        r"do not stack: float32 of shape \(2,\) and float32 of shape \(3,\). .* a list with a tensor",
    ),
    "unlike": (Summarised, r"float32 of shape \(2,\) and rows of their own, float32 of shape \(3,\)"),
    "twice": (Summarised, "both measure 'auc'"),
    "sometimes": (Summarised, "'x' of held-out sample 8 was gathered 0 times, not once. Have Summarised.evaluate"),
    "no dict": (Summarised, "Summarised.summarise gave a float. Return a dict of numbers"),
    "a row": (Summarised, r"gave for 'auc' a Tensor of shape \(3,\), which is no number"),
    "a word": (Summarised, "gave for 'auc' a str, which is no number"),
    "no name": (Summarised, "gave for 3 a float"),
    "fails": (Summarised, r"summarise failed: KeyError: 'no such class' \(.*test_collecting.py:\d+\). Mend it"),
}


def evaluated(kind: type[Wrong], mistake: str, layout: str) -> str:
    with phalanx.Engine(kind(kind=mistake), Layout.parse(layout), device="cpu") as engine:
        try:
            return str(engine.evaluate())
        except phalanx.WrongUse as refusal:
            return str(refusal)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_words(mistake: str) -> None:
    kind, words = MISTAKES[mistake]
    with phalanx.Engine(kind(kind=mistake), device="cpu") as engine, pytest.raises(phalanx.WrongUse, match=words):
        engine.evaluate()


@pytest.mark.parametrize("mistake", ["uneven", "sometimes", "fails", "a word"])
def test_all_ranks_tell_the_same(ranks: Ranks, mistake: str) -> None:
    found = ranks(2, evaluated, Summarised, mistake, "dp=2")
    assert found[0] == found[1]
    assert "Summarised" in found[0]


def test_numbers_of_any_kind() -> None:
    class Kinds(Digits):
        def summarise(self, gathered):
            x = gathered["x"].numpy()
            return {"a": 1, "b": x.mean(), "c": x[:1], "d": True, "e": torch.ones(1, 1), "f": float("nan")}

    found = numbers(Kinds(), {"x": torch.ones(2)})
    assert all(type(value) is float for value in found.values())
    assert found.pop("f") != found
    assert set(found.values()) == {1.0}
