"""A sweep of learning rates: what is read off its curve."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from phalanx import WrongUse
from phalanx.train.options import Options
from phalanx.train.rate_sweep import Sweep, has_diverged, rate_at, sweep
from phalanx.train.resolving import job_of
from tests.tasks import Digits
from tests.train.test_turns import Alternating

RATES = [10.0 ** (-6 + number / 10) for number in range(61)]


def curve(lowest: float) -> list[float]:
    """Flat, then a valley with its steepest side a decade before the lowest, then up."""
    center = math.log10(lowest)
    return [
        2.0 - 1.0 / (1 + math.exp(-6 * (math.log10(rate) - (center - 1)))) + max(0.0, math.log10(rate) - center) ** 2
        for rate in RATES
    ]


def test_rates_grow_by_equal_factors() -> None:
    found = [rate_at(step, 1e-4, 1.0, 5) for step in range(5)]
    assert found == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1.0])


@pytest.mark.parametrize("lowest", [1e-3, 1e-1])
def test_what_is_suggested(lowest: float) -> None:
    found = Sweep(RATES, curve(lowest), curve(lowest), 1e-3, diverged=False)
    assert found.falls
    assert found.lowest == pytest.approx(lowest, rel=0.6)
    assert found.steepest == pytest.approx(lowest / 10, rel=0.3)
    assert found.suggested == pytest.approx(lowest / 10, rel=0.6)
    assert found.drawn()[-1].split() == ["└", "1.0e-06", "1.0e+00"]


def test_nothing_is_suggested_where_nothing_falls() -> None:
    for losses in ([2.0] * 61, [2.0 + number for number in range(61)], []):
        found = Sweep(RATES[: len(losses)], losses, losses, 1e-3, diverged=True)
        assert found.suggested is None
    assert Sweep([], [], [], 1e-3, diverged=True).drawn() == []


def test_divergence() -> None:
    assert not has_diverged([2.0, 1.0, 1.9])
    assert has_diverged([2.0, 1.0, 2.1])
    assert not has_diverged([2.0, 1.9, 2.3])
    assert has_diverged([2.0, 1.9, 2.5])


@pytest.mark.parametrize(
    ("ends", "words"),
    [((0.0, 1.0, 20), "are no sweep"), ((1.0, 0.1, 20), "are no sweep"), ((1e-4, 1.0, 5), "too few to see a curve")],
)
def test_what_is_no_sweep_is_refused(ends: tuple[float, float, int], words: str) -> None:
    job = job_of("digits", Digits(), None, None, "cpu", Options())
    with pytest.raises(WrongUse, match=words):
        sweep(job, *ends)
    with pytest.raises(WrongUse, match="takes turns"):
        sweep(replace(job, task=Alternating()), 1e-4, 1.0, 20)
