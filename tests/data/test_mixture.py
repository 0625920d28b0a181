"""Mixtures: each source has its share at every step, no sample comes again too soon, and ranks do not enter."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx import Task, WrongUse
from phalanx.data import Arrays, Joined, Mixture
from phalanx.data.loader import Loader
from phalanx.data.mixture import CHUNK


def mixture(*sizes: int, **options: object) -> Mixture:
    sources = {f"source {number}": Arrays(x=np.arange(size)) for number, size in enumerate(sizes)}
    return Mixture(sources, **options)  # type: ignore[arg-type]


def test_each_source_has_its_share_and_no_sample_comes_again_too_soon() -> None:
    order = mixture(50, 7, 400, weights=(0.55, 0.3, 0.15)).training_order(8, seed=3)
    steps = [order.ids(step) for step in range(100)]
    assert all(len(ids) == 8 for ids in steps)
    counts = order.counts(np.arange(100))
    expected = np.array([0.55, 0.3, 0.15]) * 8
    assert (np.abs(counts - expected) < 1).all(), "a step is as near as whole samples allow"
    assert np.abs(counts.mean(0) - expected).max() < 0.15
    for source, (start, size) in enumerate([(0, 50), (50, 7), (57, 400)]):
        seen = [i - start for ids in steps for i in sorted(ids) if start <= i < start + size]
        by_step = [[i - start for i in ids if start <= i < start + size] for ids in steps]
        assert [len(each) for each in by_step] == counts[:, source].tolist()
        times = np.bincount(seen, minlength=size)
        assert times.max() - times.min() <= 1, "each sample as often as any other"


def test_weights_change_with_the_step() -> None:
    found = mixture(10, 10, weights={"0": [1, 0], "4": [1, 1], "0.8": [0, 1]}, steps=10).training_order(4, 0)
    counts = found.counts(np.arange(12)).tolist()
    assert counts[:4] == [[4, 0]] * 4
    assert counts[4:8] == [[2, 2]] * 4
    assert counts[8:] == [[0, 4]] * 4


def test_any_step_is_begun_at_alike_by_any_number_of_ranks() -> None:
    data = mixture(11, 30, weights=(1, 2))
    far = 3 * CHUNK + 5
    before = data.training_order(6, 1).before(far)
    whole = data.training_order(6, 1)
    assert before.tolist() == whole.counts(np.arange(far)).sum(0).tolist()
    for ranks in (1, 2, 3):
        parts = [
            Loader(data, Task().collate, data.training_order(6, 1), micro_batches=1, ranks=ranks, rank=rank)
            for rank in range(ranks)
        ]
        batches = [next(part.batches(far, far + 1)) for part in parts]
        found = [int(i) for each in batches for micro in each.micro_batches for i in micro.tensors["x"]]
        assert found == [int(data[i]["x"]) for i in whole.ids(far)]
        assert len({each.samples for each in batches}) == 1


def test_a_sample_knows_its_source() -> None:
    joined = Joined({"a": Arrays(x=np.arange(3)), "b": Arrays(x=np.arange(2))})
    assert [(int(joined[i]["x"]), joined[i]["source"]) for i in range(5)] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1)]
    with pytest.raises(IndexError):
        joined[5]


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ((1,), "are none of 2 sources"),
        ((0, 0), "one at least above 0"),
        ((1, -1), "a number from 0 up"),
        ({"5": (1, 1)}, "weights for step 0"),
        ({"0": (1, 1), "1.5": (1, 1)}, "is no step"),
        ({"0": (1, 1), "soon": (1, 1)}, "is no step"),
        ({"0": (1, 1), "0.5": (1, 1)}, "how many steps"),
    ],
)
def test_weights_that_are_none_are_refused(weights: object, said: str) -> None:
    with pytest.raises(WrongUse, match=said):
        mixture(3, 3, weights=weights)
