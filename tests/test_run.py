"""The run's folder: settings that read back, events that survive a kill, names that do not collide."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from phalanx import Run, WrongUse
from phalanx.run import EventLog, pause_of, read_settings


def test_settings_read_back(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "one", "unused")
    settings = {
        "run": {"task": 'a "quoted" \\ name'},
        "settings": {"a": 1, "b": 2.5e-9, "c": True, "d": [1, 2], "e": "ü"},
    }
    run.write_settings(settings | {"more": {"none": None, "inf": math.inf}})
    assert run.settings() == settings | {"more": {"inf": math.inf}}


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path) -> None:
    Run.create(tmp_path / "one", "x").write_settings({})
    with pytest.raises(WrongUse, match="holds a run already"):
        Run.create(tmp_path / "one", "x")


def test_new_runs_get_names_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [Run.create(None, "gpt").path.name for _ in range(3)] == ["gpt-001", "gpt-002", "gpt-003"]


def test_events_are_json_lines_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "one", "x")
    with EventLog(run, 3) as log:
        log.write("step", step=0, loss=math.nan, seconds={"forward": math.inf})
        log.write("step", step=1, loss=0.1)
    with run.events_path(3).open("a") as file:
        file.write('{"kind": "st')
    events = list(run.events(3))
    assert [event["step"] for event in events] == [0, 1]
    assert events[0]["loss"] == "nan"
    for line in run.events_path(3).read_text().splitlines()[:2]:
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_steps_of_most_ranks_are_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [pause_of(rank, 10_240) for rank in (0, 1, 10_238, 10_239)] == [0, 102.4, 102.4, 0]
    assert [pause_of(rank, 2) for rank in range(2)] == [0, 0]
    run = Run.create(tmp_path / "one", "x")
    writes = []
    plain = os.write
    monkeypatch.setattr(os, "write", lambda file, content: writes.append(bytes(content)) or plain(file, content))
    with EventLog(run, 0) as log:
        for step in range(3):
            log.write("step", step=step)
    assert len(writes) == 3
    log = EventLog(run, 1, pause=60)
    log.write("start", step=0)
    for step in range(100):
        log.write("step", step=step)
    assert len(writes) == 4
    log.write("checkpoint", step=100)
    assert len(writes) == 5
    log.write("step", step=100)
    with pytest.raises(ZeroDivisionError), log:
        1 / 0  # noqa: B018
    assert [event.get("step") for event in run.events(1)] == [0, *range(100), 100, 100, None]
    with EventLog(run, 2, pause=60) as log:
        log.write("step", step=0)
    assert [event["step"] for event in run.events(2)] == [0]


def test_a_failure_is_an_event(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "one", "x")
    with pytest.raises(ZeroDivisionError), EventLog(run, 0):
        1 / 0  # noqa: B018
    assert next(run.events(0))["reason"].startswith("ZeroDivisionError")


def test_settings_that_are_missing_or_broken_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="is not there"):
        read_settings(tmp_path / "run.toml")
    (tmp_path / "run.toml").write_text("a = ")
    with pytest.raises(WrongUse, match="not valid TOML"):
        read_settings(tmp_path / "run.toml")
