"""Sums of low rank through whole steps: what they are, what they cost, and that replicas stay the same."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import phalanx
from phalanx.prove.cases import defined
from tests.layouts import task_for
from tests.parallel.weights.test_coded import train
from tests.parity import TOLERANCE, Trace, difference, reference, spread_run
from tests.ranks import Ranks
from tests.tasks import Digits


def gradients(layout: str, steps: int) -> dict[str, torch.Tensor]:
    """Whole summed gradients of the last of some steps."""
    with phalanx.Engine(Digits(width=40, steps=10, clip=1e9), layout, device="cpu") as engine:
        batches = engine.batches()
        for _ in range(steps):
            engine.step(next(batches))
        return {weight.name: own.clone() for weight, own in engine.spread.gradients.each()}


def test_the_first_steps_are_exact(ranks: Ranks) -> None:
    coded, exact = (ranks(2, gradients, layout, 1)[0] for layout in ("dp=2,comm=powersgd:1", "dp=2"))
    assert all(torch.equal(coded[name], exact[name]) for name in exact)


def test_sums_are_of_the_rank_that_was_asked_for(ranks: Ranks) -> None:
    coded, exact = (ranks(2, gradients, layout, 2)[0] for layout in ("dp=2,comm=powersgd:1", "dp=2"))
    assert [int(torch.linalg.matrix_rank(coded[name], rtol=1e-5)) for name in ("0.weight", "2.weight")] == [1, 1]
    assert torch.linalg.matrix_rank(exact["0.weight"], rtol=1e-5) > 1
    assert torch.equal(coded["0.bias"], exact["0.bias"])
    assert (coded["0.weight"] - exact["0.weight"]).norm() < exact["0.weight"].norm()


@pytest.mark.parametrize("layout", ["dp=4,comm=powersgd:1", "dp=2,fsdp=2,comm=powersgd:1"])
def test_every_rank_goes_the_same_way(ranks: Ranks, layout: str) -> None:
    found = ranks(4, train, layout)
    ((right, *_),) = ranks(1, train, "dp=1")
    assert all(other[0] == found[0][0] for other in found)
    assert layout.startswith("dp=2") or (found[0][2] and all(other[2] == found[0][2] for other in found))
    assert found[0][0] == pytest.approx(right, rel=0.3)
    assert found[0][0] != right


def calls(layout: str) -> list[int]:
    """All-reduces of each step."""
    with phalanx.Engine(Digits(width=40, steps=10), layout, device="cpu") as engine:
        found = []
        for batch in engine.batches():
            before = sum(count for (_, kind), count in engine.traffic.calls.items() if kind == "all-reduce")
            engine.step(batch)
            after = sum(count for (_, kind), count in engine.traffic.calls.items() if kind == "all-reduce")
            found.append(after - before)
        return found


def test_a_step_waits_for_two_messages_and_the_agreed_numbers(ranks: Ranks) -> None:
    assert ranks(2, calls, "dp=2,comm=powersgd:1")[0] == [2, *[3] * 9]


def test_a_step_that_is_not_finite_spoils_nothing(ranks: Ranks) -> None:
    losses, _, _, finite = ranks(2, train, "dp=2,comm=powersgd:1", 3)[0]
    assert finite
    assert any(map(math.isnan, losses))
    assert not math.isnan(losses[-1])


def spread(layout: str) -> Trace:
    return spread_run(replace(task_for(phalanx.Layout.parse(layout)), steps=3), phalanx.Layout.parse(layout))


def test_stages_that_share_weights_train_as_one_device(ranks: Ranks) -> None:
    """Some travel as they are, and lie behind the others."""
    layout = phalanx.Layout.parse("dp=2,pp=2,micro_batch=4,comm=powersgd:2")
    task = replace(task_for(layout), steps=3)
    error, where = difference(ranks(4, spread, str(layout))[0], reference(task, coded=defined(task, layout)))
    assert error < TOLERANCE, where
