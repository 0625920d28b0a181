"""Events survive a kill and a full disk, and are not written one by one by thousands of ranks."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import pytest

from phalanx import Run, events
from phalanx.events import EventLog, pause_of, say, writers
from tests.forking import fork


def test_events_are_json_lines_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "one", "x")
    with EventLog(run, 3) as log:
        log.write("step", step=0, loss=math.nan, logged={"scale": math.inf})
        log.write("step", step=1, loss=0.1)
    with run.events_path(3).open("a") as file:
        file.write('{"kind": "st')
    events = list(run.events(3))
    assert [event["step"] for event in events] == [0, 1]
    assert events[0]["loss"] == "nan"
    for line in run.events_path(3).read_text().splitlines()[:2]:
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_steps_of_most_ranks_are_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [rank // 8 for rank in range(10_240)]
    assert [pause_of(rank, hosts) for rank in (0, 1, 8, 10_232, 10_239)] == [0, 102.4, 102.4, 0, 102.4]
    assert [pause_of(rank, [0, 1]) for rank in range(2)] == [0, 0]
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


def test_one_rank_a_host_writes_what_all_share(tmp_path: Path) -> None:
    assert writers([0, 0, 0, 1, 1, 2]) == [0, 3, 5]
    run = Run.create(tmp_path / "one", "x")
    for rank, shared in ((0, True), (1, False)):
        with EventLog(run, rank, shared=shared) as log:
            log.write("start", step=0)
            log.write("step", step=0, loss=1.0, samples="abc", seconds={"forward": 0.1}, sent={"dp": 8})
            log.write("evaluation", step=0, held_out={})
            log.write("end", steps=1)
    assert [event["kind"] for event in run.events(0)] == ["start", "step", "evaluation", "end"]
    start, step = run.events(1)
    assert start["kind"] == "start"
    assert step.keys() == {"kind", "time", "step", "seconds", "sent"}
    assert list(run.ledger(0)) == [0]
    assert list(run.ledger(1)) == []


def test_a_failure_is_an_event(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "one", "x")
    with pytest.raises(ZeroDivisionError), EventLog(run, 0):
        1 / 0  # noqa: B018
    assert next(run.events(0))["reason"].startswith("ZeroDivisionError")


def leads_to(log: EventLog, path: str | Path) -> None:
    """From now on its file is another, as where a disk is full."""
    assert log._file is not None
    other = os.open(path, os.O_WRONLY)
    os.dup2(other, log._file._open())
    os.close(other)


def test_events_wait_in_memory_while_the_disk_is_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run.create(tmp_path / "one", "x")
    with EventLog(run, 0) as log:
        leads_to(log, "/dev/full")
        for step in range(3):
            log.write("step", step=step)
        log.write("checkpoint", step=3)
        assert capsys.readouterr().err.count("No space left on device; going on, events wait in memory") == 1
        leads_to(log, run.events_path(0))
        log.write("step", step=3)
        assert "can be written again" in capsys.readouterr().err
    assert [event["step"] for event in run.events(0)] == [0, 1, 2, 3, 3]


def test_not_more_events_wait_than_memory_may_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(events, "BACKLOG_BYTES", 200)
    run = Run.create(tmp_path / "one", "x")
    log = EventLog(run, 0)
    leads_to(log, "/dev/full")
    for step in range(20):
        log.write("step", step=step)
    log.close()
    assert log._file is not None
    assert len(log._file._waiting) <= 200
    assert "lacks 3 events, for which there was no room to the end" in capsys.readouterr().err


def _say_where_there_is_no_room() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    sys.stdout = os.fdopen(1, "w")
    say("   note  nobody hears this")
    os._exit(0)


def test_what_is_told_goes_on_where_nobody_can_be_told() -> None:
    process = fork(_say_where_there_is_no_room)
    process.join()
    assert process.exitcode == 0
