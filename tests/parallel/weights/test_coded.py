"""Gradients in few bits through whole steps: replicas stay the same, and training goes as without."""

from __future__ import annotations

import math

import pytest

import phalanx
from phalanx import Layout
from phalanx.checkpoint.hashing import hashed
from phalanx.parallel.weights.boxes import Box
from phalanx.prove.cases import defined
from phalanx.prove.reference.switched import Switching, method_of
from tests.parity import TOLERANCE, HostileLanguage, Trace, difference, reference, spread_run
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


class LeavingOut(phalanx.Callback):
    """Some steps train no weight of the last block, and one no embedding."""

    def trains(self, step: int, weight: str) -> bool:
        return not (weight.startswith("blocks.1") and step in (2, 3)) and not ("embed" in weight and step == 3)


class Leaving(HostileLanguage):
    def callbacks(self) -> list[phalanx.Callback]:
        return [LeavingOut()]


def leaving_out(layout: str) -> Trace:
    return spread_run(Leaving(steps=6), Layout.parse(layout), method_of=method_of)


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,comm=int4", "dp=2,fsdp=2,zero=2,comm=int4", "fsdp=2,zero=3,micro_batch=5,comm=int4", "dp=2,comm=topk:10",
        "dp=2,comm=onebit:20", "dp=2,tp=2,comm=powersgd:2", "dp=2,comm=auto", "fsdp=2,zero=2,comm=auto",
    ],
)  # fmt: skip
def test_what_is_owed_of_a_weight_that_steps_leave_out_waits_for_it(ranks: Ranks, layout: str) -> None:
    """And counts in no norm. On one device such a weight has no gradient, and what is owed of it stays."""
    task, spread = Leaving(steps=6), Layout.parse(layout)
    coded = defined(task, spread)
    assert isinstance(coded, Switching) == (spread.comm == "auto")
    right = reference(task, coded=coded, trains=LeavingOut().trains)
    assert any(gradient is None for gradient in right.gradients[2].values())
    for found in ranks(spread.world, leaving_out, layout):
        error, where = difference(found, right)
        assert error < TOLERANCE, where
