"""Utilisation: rates of steps, the share of a known peak, and what is said where there is none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.events import EventLog
from phalanx.run import Run
from phalanx.train.model_flops import ModelFlops
from phalanx.train.utilisation import Utilisation, used


def step() -> Any:
    return SimpleNamespace(slots=8, flops=0.0)


def test_a_rate_and_its_share_of_the_peak() -> None:
    noted: list[ModelFlops] = []
    found = [None, ModelFlops(1e12)]
    used = Utilisation(2, "NVIDIA H200", 1e14, lambda: found.pop(0), noted.append)
    assert used.measure(step(), 0.5) == {}
    metrics = step()
    assert used.measure(metrics, 0.5) == {"tflops": 8.0, "mfu": 0.08}
    assert metrics.flops == 4e12
    assert used.measure(step(), 0.0) == {}
    assert noted == [ModelFlops(1e12)]


@pytest.mark.parametrize(
    ("counted", "peak", "told"),
    [(ModelFlops(1e9), None, "peak rate of NVIDIA X"), (ModelFlops(why="its shapes vary"), 1e14, "its shapes vary")],
)
def test_why_there_is_no_share_is_said_once(counted: ModelFlops, peak: float | None, told: str) -> None:
    said: list[str] = []
    used = Utilisation(1, "NVIDIA X", peak, lambda: counted, said=said.append)
    for _ in range(3):
        assert "mfu" not in used.measure(step(), 1.0)
    assert len(said) == 1
    assert told in said[0]


def test_what_a_run_has_used(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "one", "x")
    assert used(run) == []
    (run.path / "flops.json").write_text('{"a_sample": 1e9, "why": "", "device": "a CPU", "peak": null}')
    with EventLog(run, 0) as log:
        for number, rate in enumerate((0.1, 0.1, 0.1, 2.0, 0.5)):  # the first ones warm up, the last are of 8 and 1
            log.write("step", step=number, samples="", tflops=rate, slots=8 if number % 2 else 1)
    assert used(run) == ["1.5 TFLOP/s a rank; no MFU: the peak rate of a CPU is not known for what it computes in"]
    (run.path / "flops.json").write_text('{"a_sample": 1e9, "why": "", "device": "an H200", "peak": 3e12}')
    assert used(run) == ["1.5 TFLOP/s a rank, MFU 50.0%"]
    with EventLog(run, 0) as log:
        log.write("start", step=4)
        assert used(run) == []
        for number, rate in enumerate((0.1, 0.2, 0.3, 0.6, 0.6), 4):  # on more ranks, or elsewhere
            log.write("step", step=number, samples="", tflops=rate, slots=1)
    assert used(run) == ["600 GFLOP/s a rank, MFU 20.0%"]
