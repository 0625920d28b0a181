"""Loading: the same samples for any number of ranks, from any step, with or without workers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phalanx import WrongUse
from phalanx.data import Arrays
from phalanx.data.loader import Loader, MicroBatch
from phalanx.data.order import Order
from phalanx.train.engine import Engine
from tests.ranks import Ranks
from tests.tasks import Digits


class Noisy:
    """Samples that draw from every generator people use."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "noise": random.random() + np.random.rand() + float(torch.rand(()))}


def collate(samples: Any) -> dict[str, Any]:
    return {name: torch.tensor([sample[name] for sample in samples]) for name in samples[0]}


def loader(data: Any = None, ranks: int = 1, rank: int = 0, workers: int = 0, micro_batches: int = 2) -> Loader:
    order = Order(23, 5, seed=1)
    return Loader(data or Noisy(), collate, order, micro_batches=micro_batches, ranks=ranks, rank=rank, workers=workers)


def read(found: Loader, start: int, stop: int) -> list[tuple[int, int, float]]:
    """(step, sample, noise) of everything real, in order."""
    return [
        (batch.step, int(i), float(n))
        for batch in found.batches(start, stop)
        for micro in batch.micro_batches
        if micro.real
        for i, n in zip(micro.tensors["id"], micro.tensors["noise"], strict=True)
    ]


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_ranks_together_read_what_one_reads(ranks: int) -> None:
    whole = read(loader(), 0, 7)
    parts = [item for rank in range(ranks) for item in read(loader(ranks=ranks, rank=rank), 0, 7)]
    assert sorted(parts) == sorted(whole), "samples or their own randomness depend on the number of ranks"


def test_every_rank_has_every_micro_batch_and_stand_ins_are_marked() -> None:
    seen = [
        [(len(m.slots), m.real) for m in b.micro_batches]
        for r in range(7)
        for b in loader(ranks=7, rank=r).batches(0, 5)
    ]
    assert {len(step) for step in seen} == {2}
    assert {entry for step in seen for entry in step} == {(1, True), (1, False)}


def test_reading_starts_at_any_step() -> None:
    assert read(loader(), 3, 6) == read(loader(), 0, 6)[-len(read(loader(), 3, 6)) :]
    assert list(loader().batches(4, 4)) == []


def test_workers_read_the_same() -> None:
    assert read(loader(workers=2), 0, 7) == read(loader(), 0, 7)


def in_a_rank() -> list[tuple[int, int, float]]:
    return read(loader(workers=2), 0, 3)


def test_workers_live_inside_a_rank(ranks: Ranks) -> None:
    assert ranks(2, in_a_rank)[0] == read(loader(), 0, 3)


def test_epochs_visit_a_sample_with_new_randomness() -> None:
    visits = {}
    for _, sample, noise in read(loader(), 0, 10):
        visits.setdefault(sample, []).append(noise)
    assert all(first != second for first, second in visits.values())


def test_arrays_are_read_in_one_go() -> None:
    rows = Arrays(id=np.arange(23), noise=np.arange(23) * 0.5)
    assert [(s, i) for s, i, _ in read(loader(rows), 0, 5)] == [(s, i) for s, i, _ in read(loader(), 0, 5)]


class Ragged(Noisy):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((1 + index % 3,), float(index)), "word": str(index), "id": index}


def padded(samples: Any) -> dict[str, Any]:
    rows = [sample["x"] for sample in samples]
    pad = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"x": pad, "word": [sample["word"] for sample in samples], "n": len(rows)}


def test_a_step_has_its_columns_by_name() -> None:
    for ranks in (1, 2):
        parts = [next(iter(loader(ranks=ranks, rank=rank).batches(0, 1))) for rank in range(ranks)]
        ids = torch.cat([batch["id"] for batch in parts])
        assert sorted(ids.tolist()) == sorted(Order(23, 5, seed=1).ids(0).tolist())
        assert parts[0]["id"].tolist() == [i for micro in parts[0].micro_batches for i in micro.tensors["id"].tolist()]
        assert list(parts[0]) == ["id", "noise"]
        assert "id" in parts[0]
    empty = next(iter(loader(ranks=7, rank=0, micro_batches=1).batches(0, 1)))
    assert not any(micro.real for micro in empty.micro_batches)
    assert len(empty["id"]) == 0, "a stand-in's sample is given for its own"
    with pytest.raises(WrongUse, match="the batch has no 'ids'; did you mean 'id'"):
        empty["ids"]
    order = Order(23, 5, seed=1)
    ragged = next(iter(Loader(Ragged(), padded, order, micro_batches=3, ranks=1, rank=0).batches(0, 1)))
    assert ragged["word"] == [str(i) for i in order.ids(0)]
    with pytest.raises(WrongUse, match=r"'x' of this rank's 3 .* cannot be joined: .*Look at each by itself"):
        ragged["x"]
    with pytest.raises(WrongUse, match="'n' of this rank's 3"):
        ragged["n"]


class NotDicts(Noisy):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3)


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_are_no_dicts_are_refused_plainly(workers: int) -> None:
    with pytest.raises(WrongUse) as refusal:
        read(loader(NotDicts(), workers=workers), 0, 1)
    assert str(refusal.value).startswith("sample ")
    assert "Traceback" not in str(refusal.value)


Told = tuple[list[int], list[int], bool]


def told(micro: MicroBatch) -> Told:
    return micro.tensors["id"].tolist(), micro.slots.tolist(), micro.real


def by_leaf(ranks: int) -> dict[tuple[int, int], Told]:
    """What the ranks read together, by step and virtual micro-batch."""
    found = {}
    for rank in range(ranks):
        own = range(rank, 4, ranks)
        order = Order(23, 5, seed=1)
        part = Loader(Noisy(), collate, order, micro_batches=4 // ranks, ranks=ranks, rank=rank, leaves=own)
        for batch in part.batches(0, 5):
            found |= {(batch.step, leaf): told(m) for leaf, m in zip(own, batch.micro_batches, strict=True)}
            found[batch.step, -1] = told(part.first(batch.step))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_virtual_micro_batch_is_the_same_whoever_reads_it(ranks: int) -> None:
    found = by_leaf(ranks)
    assert found == by_leaf(1)
    assert all(found[step, -1] == found[step, 0] for step in range(5)), "the first is not the first"
    assert {real for _, _, real in found.values()} == {True, False}


class Opening:
    """Opens its file when it is first read, as people do for h5py and zip files."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, None

    def __len__(self) -> int:
        return self.path.stat().st_size // 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.file is None:
            self.file = open(self.path, "rb", buffering=0)  # noqa: SIM115
        self.file.seek(8 * index)
        return {"x": int.from_bytes(self.file.read(8), "little")}


@dataclass
class Lazily(Digits):
    path: str = ""
    workers: int = 3

    def data(self) -> Any:
        return Opening(Path(self.path))


def test_workers_find_nothing_that_was_opened_before_them(tmp_path: Path) -> None:
    (tmp_path / "numbers").write_bytes(b"".join(n.to_bytes(8, "little") for n in range(400)))
    with Engine(Lazily(path=str(tmp_path / "numbers"), steps=40), device="cpu") as engine:
        assert engine.loader.reader.data.file is None
        assert engine.loader.first(3).tensors["x"].tolist() == engine.order.ids(3).tolist()
        assert engine.loader.reader.data.file is None
        for batch in engine.loader.batches(0, 40):
            assert batch.micro_batches[0].tensors["x"].tolist() == engine.order.ids(batch.step).tolist()
