"""Generation after generation: who is started again, who is not, and what outlives a rank."""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.checkpoint.slot import new_memory
from phalanx.errors import WrongUse
from phalanx.launch import heartbeats
from phalanx.launch.heartbeats import ARRIVED, RankHeartbeat
from phalanx.launch.local import HostOutcome
from phalanx.launch.supervisor import Host, Supervisor
from phalanx.run import Run


def supervised(
    path: Path, program: Callable[[Host], Any], ranks: int = 2, **options: Any
) -> tuple[HostOutcome, Supervisor]:
    run = Run(path)
    run.path.mkdir(exist_ok=True)
    supervisor = Supervisor(run, ranks, new_memory, **options)
    outcome = supervisor.supervise(program)
    for slots in supervisor.memory:
        for memory in slots:
            os.close(memory)
    return outcome, supervisor


def stepping(host: Host, steps: int, then: Callable[[int, int], None]) -> int:
    """A rank that counts its steps in memory that outlives it, and goes on from there."""
    rank = int(os.environ["RANK"])
    memory = host.memory[rank][0]
    if os.fstat(memory).st_size == 0:
        os.ftruncate(memory, 8)
    done = memoryview(mmap.mmap(memory, 8)).cast("q")
    heartbeat = RankHeartbeat(host.heartbeats.row(rank), patience=60)
    while done[0] < steps:
        time.sleep(0.01)
        done[0] += 1
        host.heartbeats.row(rank)[ARRIVED] += 1
        heartbeat.stepped(done[0])
        then(host.generation, done[0])
    return done[0]


def dying(host: Host) -> int:
    def then(generation: int, step: int) -> None:
        if os.environ["RANK"] == "1" and step == 5 * generation and generation < 4:
            os.kill(os.getpid(), signal.SIGKILL)

    return stepping(host, 30, then)


def test_a_killed_rank_is_started_again_and_finds_what_it_kept(tmp_path: Path) -> None:
    outcome, supervisor = supervised(tmp_path, dying)
    assert outcome.result == 30
    assert supervisor.recoveries == 3
    assert supervisor.run.generation() == 4
    failures = [event for event in supervisor.run.events(1) if event["kind"] == "failure"]
    assert len(failures) == 3
    assert all("SIGKILL" in event["reason"] for event in failures)


def raising(host: Host) -> int:
    def then(generation: int, step: int) -> None:
        if os.environ["RANK"] == "0" and step >= 5:
            raise ValueError(f"always here, in generation {generation}")

    return stepping(host, 30, then)


def raising_alike(host: Host) -> None:
    RankHeartbeat(host.heartbeats.row(int(os.environ["RANK"])), patience=60).stepped(5)
    raise ValueError("sample 40 cannot be read")


def test_a_crash_loop_without_progress_ends(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    outcome, supervisor = supervised(tmp_path, raising, restarts=2)
    assert outcome.failures
    assert "always here" in outcome.failures[0].reason
    assert supervisor.run.generation() <= 5
    assert "generations in a row" in capfd.readouterr().err


def failing_to_read(host: Host) -> None:
    RankHeartbeat(host.heartbeats.row(int(os.environ["RANK"])), patience=60).stepped(5)
    raise OSError("Input/output error")


def test_storage_that_fails_is_tried_as_often_as_is_said(tmp_path: Path) -> None:
    outcome, supervisor = supervised(tmp_path, failing_to_read, restarts=3)
    assert outcome.failures
    assert supervisor.recoveries == 3


def test_the_same_error_after_the_same_step_is_not_tried_a_third_time(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome, supervisor = supervised(tmp_path, raising_alike, restarts=10)
    assert outcome.failures
    assert supervisor.recoveries == 1
    assert "it was the same the time before, after the same step" in capfd.readouterr().err


def refusing(host: Host) -> None:
    raise WrongUse("the width must be even. Set it to 4.")


def broken(host: Host) -> None:
    raise ZeroDivisionError("in the first step")


@pytest.mark.parametrize("program", [refusing, broken])
def test_what_starting_again_cannot_mend_is_told_at_once(tmp_path: Path, program: Callable[[Host], Any]) -> None:
    outcome, supervisor = supervised(tmp_path, program)
    assert outcome.failures
    assert supervisor.recoveries == 0


def stopping(host: Host) -> int:
    def then(generation: int, step: int) -> None:
        if generation == 1 and step == 8 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        while generation == 1 and step == 9:  # as one that waits in a collective
            time.sleep(0.01)

    return stepping(host, 12, then)


def sleeping(host: Host) -> int:
    def then(generation: int, step: int) -> None:
        while generation == 1 and ((step == 8 and os.environ["RANK"] == "1") or step == 9):
            time.sleep(0.01)

    return stepping(host, 12, then)


@pytest.mark.parametrize(("program", "words"), [(stopping, "stopped (SIGSTOP)"), (sleeping, "has not moved")])
def test_a_rank_that_hangs_is_named_and_replaced(
    tmp_path: Path, program: Callable[[Host], Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "LEAST_SECONDS", 1.0)
    outcome, supervisor = supervised(tmp_path, program)
    assert outcome.result == 12
    (failure,) = [event for event in supervisor.run.events(1) if event["kind"] == "failure"]
    assert words in failure["reason"]
    assert failure["stuck"]
