"""Two parts without a common sample, the same wherever they are asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import phalanx
from phalanx.data import Arrays, split
from phalanx.data.loader import Loader
from phalanx.data.order import Order
from phalanx.task import Task


@pytest.mark.parametrize("size", [2, 3, 10, 97, 1000])
@pytest.mark.parametrize("held_out", [0.1, 0.5, 1, 0.9])
@pytest.mark.parametrize("seed", [0, 7])
def test_parts_are_disjoint_and_leave_nothing_out(size: int, held_out: float, seed: int) -> None:
    if isinstance(held_out, float) and not 0 < round(size * held_out) < size:
        with pytest.raises(phalanx.WrongUse, match="leaves one part empty"):
            split(range(size), held_out, seed)
        return
    train, kept = split(range(size), held_out, seed)
    assert len(kept) == (held_out if isinstance(held_out, int) else round(size * held_out))
    assert sorted([*(train[i] for i in range(len(train))), *(kept[i] for i in range(len(kept)))]) == list(range(size))


def test_it_is_pure_and_depends_on_the_seed() -> None:
    def kept(seed: int) -> list[int]:
        torch.rand(3)  # whatever was drawn before
        np.random.rand(3)
        part = split(range(100), 0.2, seed)[1]
        return [part[i] for i in range(len(part))]

    assert kept(0) == kept(0) != kept(1)
    assert kept(0) != list(range(80, 100))


def test_nothing_is_read_before_it_is_asked_for() -> None:
    class Samples:
        read: list[int] = []  # noqa: RUF012

        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> int:
            self.read.append(index)
            return index

    train, _ = split(Samples(), 3)
    assert not Samples.read
    assert Samples.read == [train[2]]


def test_arrays_give_many_rows_at_once_and_the_same() -> None:
    data = Arrays(x=torch.arange(40).view(20, 2))
    train, _ = split(split(data, 2, seed=3)[0], 4)
    loader = Loader(train, Task().collate, Order(len(train), 5), micro_batches=1, ranks=1, rank=0, plain=True)
    found = next(loader.batches(0, 1)).micro_batches[0].tensors["x"]
    assert torch.equal(found, torch.stack([train[int(i)]["x"] for i in Order(len(train), 5).ids(0)]))


@pytest.mark.parametrize("index", [16, -17])
def test_a_sample_that_is_not_there(index: int) -> None:
    with pytest.raises(IndexError):
        split(range(20), 4)[0][index]


@pytest.mark.parametrize("held_out", [0, 1.0, 0.0, -1, 20, True])
def test_an_empty_part_is_refused(held_out: float) -> None:
    with pytest.raises(phalanx.WrongUse, match="leaves one part empty"):
        split(range(20), held_out)
