"""Draws while samples are read: keyed by seed, visit and sample, whichever generators are seeded for it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

from phalanx import counter, data
from phalanx.data.seeding import SampleReader, sample_at, sample_seed, seed_globally

SIZE = 300


def forked(index: int) -> float:
    """What moves no generator: its state is put back."""
    if index < 50:
        return 0.5
    with torch.random.fork_rng(devices=[]):
        before, found = np.random.get_state(), float(np.random.rand()) + float(torch.rand(()))
        np.random.set_state(before)
        return found


DRAWS = {
    "forked": forked,
    "none": lambda index: 0.5,
    "python": lambda index: random.random(),
    "numpy": lambda index: float(np.random.rand()),
    "normal": lambda index: float(np.random.randn()),
    "torch": lambda index: float(torch.rand(())),
    "all": lambda index: random.random() + float(np.random.rand()) + float(torch.rand(())),
    "late": lambda index: random.random() if index == 250 else float(np.random.rand()) if index > 200 else 0.5,
    "gauss once": lambda index: float(np.random.randn()) if index == 77 else 0.5,
}


class Drawing:
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.reads = 0

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        return {"id": index, "noise": DRAWS[self.kind](index)}


def wanted(kind: str, visit: int) -> list[float]:
    """Every generator seeded for every sample, by hand."""
    found = []
    for index in range(SIZE):
        seed = counter.key(5, "sample", visit, index) & 0xFFFFFFFF
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        found.append(DRAWS[kind](index))
    return found


def state() -> tuple[Any, ...]:
    return random.random(), float(np.random.rand()), float(np.random.randn()), float(torch.rand(()))


@pytest.mark.parametrize("kind", DRAWS)
def test_samples_are_read_with_all_generators_seeded_for_each(kind: str) -> None:
    np.random.randn()  # leaves a second one behind, which is nobody's
    for visit in (0, 3):
        reader = SampleReader(Drawing(kind), 5)
        expected = wanted(kind, visit)
        after = state()
        assert [reader.read(index, visit)["noise"] for index in range(SIZE)] == expected
        assert state() == after, "what a collate draws would be something else"


def test_the_number_is_that_of_a_key() -> None:
    assert sample_seed(3, 7, 11) == counter.key(3, "sample", 7, 11) & 0xFFFFFFFF
    seed_globally(3, "sample", 7, 11)
    expected = random.random()
    assert sample_at(Drawing("python"), 11, 3, 7)["noise"] == expected


class Own:
    """Draws from a generator of its own, as albumentations' transforms do."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng()

    def reseed(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "noise": float(self.rng.random())}


def around(kind: str) -> Any:
    own = Own()
    return {
        "itself": own, "split": data.split(own, 10)[0], "subset": Subset(own, range(280)),
        "concat": ConcatDataset([own, own]), "mixed": data.Mixup(own, keep=["id", "noise"]),
        "by length": data.ByLength(own, [1] * SIZE),
    }[kind]  # fmt: skip


@pytest.mark.parametrize("kind", ["itself", "split", "subset", "concat", "mixed", "by length"])
def test_generators_of_ones_own_are_reseeded(kind: str) -> None:
    samples = around(kind)
    alone = [float(sample_at(samples, index, 5, 2)["noise"]) for index in range(40)]
    assert alone == [float(sample_at(around(kind), index, 5, 2)["noise"]) for index in range(40)]
    assert len(set(alone)) == 40
    reader = SampleReader(around(kind), 5)
    quickly = [reader.read(index, 2) for index in range(100)]
    assert [float(sample["noise"]) for sample in quickly[:40]] == alone
