"""Data that is none is refused in the same words with the check and without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from phalanx import Engine, WrongUse
from phalanx.train.check.beside import checked
from tests.data.test_kinds import Formatted, Frame, sample
from tests.tasks import Digits
from tests.test_cli import phalanx

X, Y = torch.ones(40, 4), torch.zeros(40, dtype=torch.int64)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter([sample()] * 40)


MISTAKEN: dict[str, tuple[Any, str]] = {
    "loader": (lambda: DataLoader(TensorDataset(X, Y), batch_sampler=[[0]]), "a DataLoader with batch_sampler=list"),
    "columns": (lambda: {"x": X, "y": Y}, 'return phalanx.data.Arrays(x=columns["x"], y=columns["y"])'),
    "frame": (Frame, "return phalanx.data.Arrays(width="),
    "splits": (lambda: {"train": Formatted(), "test": Formatted()}, 'return data["train"].with_format("torch")'),
    "generator": (lambda: (sample() for _ in range(40)), "return list(stream)"),
    "stream": (Stream, "return list(stream)"),
    "array": (lambda: X, "return phalanx.data.Arrays(x=data)"),
    "arrays": (lambda: (X, Y), "return phalanx.data.Arrays(x=x, y=y)"),
    "text": (lambda: "data.csv", "phalanx.data.JsonLines(path)"),
    "nothing": (lambda: None, "returned nothing. Return something with len()"),
    "number": (lambda: 7, "has no len()"),
    "empty": (list, "is empty: its len() is 0"),
    "tuples": (lambda: TensorDataset(X, Y), 'return phalanx.data.Named(dataset, "x", "y")'),
    "tensors": (lambda: list(X), "return phalanx.data.Arrays(x=data)"),
    "unformatted": (lambda: Formatted([sample(x=[1, 2, 3, 4])] * 40), 'return dataset.with_format("torch")'),
    "lists": (lambda: [sample(x=[1, 2, 3, 4])] * 40, "which does not stack. Give tensors"),
    "none in it": (lambda: [sample(y=None)] * 40, "is None, which does not stack"),
    "object in it": (lambda: [sample(y=object())] * 40, "is a object, which does not stack"),
}


@dataclass
class Given(Digits):
    """Mistaken data; ``aside``: that is held out."""

    kind: str = "arrays"
    global_batch: int = 4
    aside: bool = False

    def data(self) -> Any:
        return super().data() if self.aside else MISTAKEN[self.kind][0]()

    def held_out(self) -> Any:
        return MISTAKEN[self.kind][0]() if self.aside else None


@pytest.mark.parametrize("kind", MISTAKEN)
def test_train_says_what_it_would_without_the_check(kind: str, tmp_path: Path) -> None:
    with ExitStack() as undo, pytest.raises(WrongUse) as refused:
        next(undo.enter_context(Engine(Given(kind=kind), device="cpu")).batches())
    words = ("train", f"{__file__}:Given", "--set", f"kind={kind}", "--steps", "1", "--device", "cpu")
    done = phalanx(*words, cwd=tmp_path)
    assert MISTAKEN[kind][1] in done.stderr
    assert done.returncode == 2
    assert done.stderr.startswith(f"phalanx: {refused.value}")
    assert "\n" not in done.stderr.strip(), "but for the place, which may follow"
    assert "not checked" not in done.stdout


@pytest.mark.parametrize("kind", [kind for kind in MISTAKEN if kind != "nothing"][:13])
def test_so_is_held_out_data(kind: str) -> None:
    found = checked(Given(kind=kind, aside=True))
    assert MISTAKEN[kind][1] in found.refusal
    assert found.anyway
