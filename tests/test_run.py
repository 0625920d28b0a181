"""The run's folder: settings that read back, events that survive a kill, names that do not collide."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from phalanx import Run, WrongUse
from phalanx import run as run_of
from phalanx.run import EventLog, pause_of, read_settings, write_whole


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


# Disks that are full, and power that fails.


def test_events_wait_in_memory_while_the_disk_is_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run.create(tmp_path / "one", "x")
    run.events_path(0).parent.mkdir()
    run.events_path(0).symlink_to("/dev/full")
    with EventLog(run, 0) as log:
        for step in range(3):
            log.write("step", step=step)
        log.write("checkpoint", step=3)
        assert capsys.readouterr().err.count("No space left on device; going on, events wait in memory") == 1
        real = os.open(tmp_path / "real", os.O_WRONLY | os.O_CREAT)
        os.dup2(real, log._file or -1)
        os.close(real)
        log.write("step", step=3)
        assert "can be written again" in capsys.readouterr().err
    run.events_path(0).unlink()
    (tmp_path / "real").rename(run.events_path(0))
    assert [event["step"] for event in run.events(0)] == [0, 1, 2, 3, 3]


def test_not_more_events_wait_than_memory_may_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_of, "BACKLOG_BYTES", 200)
    run = Run.create(tmp_path / "one", "x")
    run.events_path(0).parent.mkdir()
    run.events_path(0).symlink_to("/dev/full")
    log = EventLog(run, 0)
    for step in range(20):
        log.write("step", step=step)
    log.close()
    assert len(log._waiting) <= 200
    assert "lacks 3 events, for which there was no room to the end" in capsys.readouterr().err


def test_a_small_file_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, done = Run.create(tmp_path / "one", "x"), []

    def noted(name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            which = os.readlink(f"/proc/self/fd/{args[0]}") if isinstance(args[0], int) else str(args[0])
            done.append((name, Path(which).name))
            return real(*args, **kwargs)

        return call

    monkeypatch.setattr(os, "fsync", noted("fsync", os.fsync))
    monkeypatch.setattr(Path, "replace", noted("rename", Path.replace))
    for write, name in (
        (lambda: write_whole(run.path / "a", "text"), "a"),
        (lambda: run.next_generation(), "generation"),
        (lambda: run.write_settings({}), "run.toml"),
    ):
        done.clear()
        write()
        assert done == [("fsync", f"{name}.unfinished"), ("rename", f"{name}.unfinished"), ("fsync", "one")]


@pytest.mark.parametrize("content", ["", "4", "\0\0\0"])
def test_the_number_of_the_last_generation_is_found_again(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.create(tmp_path / "one", "x")
    with EventLog(run, 0) as log:
        for generation in (3, 7):
            log.write("start", step=0, generation=generation)
    assert run.generation() == 7
    (run.path / "generation").write_text(content)
    assert run.generation() == (4 if content == "4" else 7)
    assert ("generation is damaged" in capsys.readouterr().err) == (content != "4")
    assert run.next_generation(at_least=20) == 20
