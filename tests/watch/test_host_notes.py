"""Hosts beside slow ranks: what their figures say is told, and nothing where they say nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from phalanx.run import Run
from phalanx.watch.host_notes import host_notes


def write(run: Run, first: int, lines: list[dict[str, Any]]) -> None:
    path = run.path / "events" / f"host-{first:05d}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"kind": "host", "cores": 2, **line}) + "\n" for line in lines))


def test_saturated_processors_and_throttled_gpus_are_told_of_their_host(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert host_notes(run) == []
    write(run, 0, [{"host": "a", "cpu": 40.0}] * 8)
    busy = [{"host": "b", "cpu": 99.0, "gpu3_temperature": 60.0}] * 6
    hot = [{"host": "b", "cpu": 98.0, "gpu3_temperature": 88.0, "gpu3_throttled": "heat"}] * 4
    write(run, 8, busy + hot)
    assert host_notes(run, "a") == []
    assert host_notes(run) == host_notes(run, "b") == [
        "the processors of b were saturated meanwhile: its 2 cores were 99% busy",
        "GPU 3 of b was throttled (heat) in 4 of 10 looks, at up to 88 degrees",
    ]  # fmt: skip


def test_one_look_says_nothing(tmp_path: Path) -> None:
    write(Run(tmp_path), 0, [{"host": "a", "cpu": 100.0}])
    assert host_notes(Run(tmp_path)) == []


def test_a_host_that_left_the_run_is_not_told_of(tmp_path: Path) -> None:
    write(Run(tmp_path), 0, [{"host": "a", "cpu": 40.0, "time": 1000.0}] * 8)
    write(Run(tmp_path), 8, [{"host": "b", "cpu": 100.0, "time": 900.0}] * 8)
    assert host_notes(Run(tmp_path)) == []
