"""What counts as the same, and what comes first."""

from __future__ import annotations

import math

import torch

from phalanx.prove.ladder import LEAST_BAR, MOST_BAR, Difference, Standard, first, off
from phalanx.prove.reference.hostile import Trial, hostile
from phalanx.prove.reference.loop import Reference
from tests.prove.tasks import Plain


def test_the_first_rung_of_the_first_step_leads() -> None:
    found = [
        Difference(1, "settings", "lr", math.inf, 0),
        Difference(0, "weights", "a", 1.0, 0),
        Difference(0, "gradients", "b", 0.1, 0),
        Difference(0, "gradients", "c", 0.2, 1),
    ]
    assert [d.name for d in first(found)] == ["c", "b"]
    assert first([]) == []


def test_next_to_nothing_is_measured_by_the_others() -> None:
    noise, nothing = torch.full((3,), 1e-17), torch.zeros(3)
    assert off(noise, nothing, 0.0, 1.0) < 1e-12
    assert off(torch.ones(3), torch.zeros(4), 1.0, 1.0) == math.inf
    assert off(torch.tensor([math.nan]), torch.ones(1), 1.0, 1.0) == math.inf


def test_the_bar_follows_from_what_rounding_becomes() -> None:
    task = hostile(Plain(), Trial(3))
    standard = Standard.measured(Reference(task).run(), [Reference(task, nudge=1).run()])
    assert 0 < standard.sensitivity < 1e-13
    assert LEAST_BAR <= standard.bar <= MOST_BAR
    assert standard.certifies
    assert [step.skipped for step in standard.steps] == [False, False, True, False]
    gradient = standard.steps[0].gradients["0.weight"]
    assert gradient is not None
    assert standard.error(0, "gradients", "0.weight", gradient * 2) > 0.5
    assert standard.error(0, "gradients", "0.weight", None) == math.inf
