"""Gradients in few bits through whole steps: replicas stay the same, and training goes as without."""

from __future__ import annotations

import math

import pytest

import phalanx
from phalanx.checkpoint.hashing import hashed
from phalanx.parallel.weights.boxes import Box
from tests.ranks import Ranks
from tests.tasks import Digits


def train(layout: str, spoil: int = -1) -> tuple[list[float], dict[str, int], list[int], bool]:
    """Losses, bytes by kind, hashes of what ranks of one axis hold alike, and whether all of that is finite."""
    with phalanx.Engine(Digits(width=256, steps=8, spoil=spoil), layout, device="cpu") as engine:
        losses = [engine.step(batch).loss for batch in engine.batches()]
        kinds = {kind: count for (_, kind), count in engine.traffic.sent.items()}
        weights = engine.spread.weights.values()
        alike = [w.shard.data if engine.layout.dp > 1 else w.full.data for w in weights if w.storage.always_whole]
        owed = [o.now for b in engine.spread.buckets if b.coded for o in b.coded.all_owed()]
        finite = all(bool(tensor.isfinite().all()) for tensor in [*alike, *owed])
        return losses, kinds, [hashed(t, Box.whole(t), t.shape) for t in alike], finite


@pytest.mark.parametrize(
    ("layout", "near"),
    [("dp=4,comm=int4", 0.2), ("dp=4,comm=int8", 0.02), ("dp=4,comm=bf16", 0.02), ("fsdp=4,zero=2,comm=int8", 0.02)],
)
def test_every_rank_goes_the_same_way(ranks: Ranks, layout: str, near: float) -> None:
    found = ranks(4, train, layout)
    ((right, *_),) = ranks(1, train, "dp=1")
    assert all(other[0] == found[0][0] and other[2] == found[0][2] for other in found)
    assert found[0][2]
    assert found[0][0] == pytest.approx(right, rel=near)
    assert found[0][0] != right


def test_bytes_are_those_of_codes(ranks: Ranks) -> None:
    coded, exact = (ranks(4, train, layout)[0][1] for layout in ("dp=4,comm=int4", "dp=4"))
    codes = coded["all-to-all"] + coded["all-gather"]
    assert coded["all-reduce"] < exact["all-reduce"] / 10
    assert codes < exact["all-reduce"] / 4  # biases of a few numbers take blocks of their own


def test_a_step_that_is_not_finite_spoils_nothing(ranks: Ranks) -> None:
    for layout in ("dp=2,comm=int4", "fsdp=2,comm=int4"):
        losses, _, _, finite = ranks(2, train, layout, 3)[0]
        assert finite
        assert any(map(math.isnan, losses))
        assert not all(map(math.isnan, losses))
