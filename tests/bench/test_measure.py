"""A contender is measured by steps that were made, after those that warm up."""

from __future__ import annotations

import pytest

from phalanx.bench import measure
from phalanx.bench.contenders import Setting
from tests.bench.test_shape import SMALL


def test_tokens_a_second_follow_from_the_median_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, made = [0.0], []

    def step() -> None:
        made.append(1)
        clock[0] += 10.0 if len(made) == 1 else 0.5

    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    found = measure.measured(step, Setting(SMALL, "cpu", "fp32"))
    assert found["first_step_s"] == 10
    assert found["ms"] == 500
    assert found["tokens_per_s"] == SMALL.tokens / 0.5
    assert found["gib"] > 0
    assert len(made) == 1 + measure.WARM + measure.ROUNDS * measure.EACH["cpu"]
