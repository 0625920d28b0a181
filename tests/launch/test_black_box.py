"""The black box: records in the run's folder while ranks run and when they fail, stacks when somebody asks for them."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from phalanx import flight
from phalanx.checkpoint.slot import new_memory
from phalanx.launch import black_box, heartbeats, stacks
from phalanx.launch.heartbeats import RankHeartbeat
from phalanx.launch.local import HostOutcome
from phalanx.launch.supervisor import Host, Supervisor
from phalanx.parallel.communication.recorder import FlightRecorder
from phalanx.run import Run


def supervised(path: Path, program: object, **options: object) -> HostOutcome:
    supervisor = Supervisor(Run(path), 2, new_memory, **options)  # type: ignore[arg-type]
    outcome = supervisor.supervise(program)  # type: ignore[arg-type]
    for slots in supervisor.memory:
        for memory in slots:
            os.close(memory)
    return outcome


def begun(host: Host) -> tuple[int, FlightRecorder]:
    rank = int(os.environ["RANK"])
    stacks.answer(host.black_box.stacks[rank])
    recorder = FlightRecorder(host.black_box.row(rank), rank, 2, host.generation)
    recorder.doing("backward")
    recorder.launched("g", "dp", 2, "all-reduce", torch.ones(2))
    return rank, recorder


def dies(host: Host) -> None:
    rank, _ = begun(host)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


def test_a_killed_ranks_record_is_in_the_folder_with_an_account(tmp_path: Path) -> None:
    assert supervised(tmp_path, dies, restarts=2).failures
    account = json.loads((tmp_path / "failures" / "generation-00001-from-00000.json").read_text())
    assert account["generation"] == 1
    assert account["failures"][0].items() >= {"rank": 1, "by_signal": True, "stuck": False}.items()
    assert "SIGKILL" in account["failures"][0]["reason"]
    assert [each.phase for each in flight.read(Run(tmp_path), 1).values()] == ["backward"] * 2
    assert len(flight.generations(Run(tmp_path))) == len(list((tmp_path / "failures").iterdir())) > 1


def hangs(host: Host) -> None:
    rank, _ = begun(host)
    heartbeat = RankHeartbeat(host.heartbeats.row(rank), patience=60)
    for step in range(8):
        time.sleep(0.01)
        heartbeat.stepped(step + 1)
    asleep() if rank else time.sleep(60)


def asleep() -> None:
    time.sleep(60)


def test_stacks_are_taken_before_a_hung_rank_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "LEAST_SECONDS", 0.5)
    monkeypatch.setattr(heartbeats, "WINDOW_SECONDS", 0.3)
    outcome = supervised(tmp_path, hangs, restarts=2)
    assert outcome.failures
    assert outcome.failures[0].stuck
    for generation in (1, 2):  # each in the same memory
        told = (stacks.folder(Run(tmp_path), generation) / "rank-00001.txt").read_text()
        assert f'{__file__}", line' in told
        assert "in asleep" in told
        assert "\0" not in told


def asks(host: Host) -> None:
    rank, _ = begun(host)
    path = host.black_box.run.path
    if rank == 1:
        while not flight.read(Run(path), 1):  # the supervisor's thread puts it there
            time.sleep(0.02)
        with Run(path).held():
            (path / "lock").write_text(f"process {os.getppid()} on {os.uname().nodename}")
            stacks.ask(Run(path))
        (path / "asked").touch()
    while not (path / "asked").exists():
        time.sleep(0.02)


def test_who_asks_a_live_run_gets_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(black_box, "SAVE_SECONDS", 0.1)
    with (tmp_path / "output").open("a"):  # a supervisor has files of its run open
        outcome = supervised(tmp_path, asks)
    assert not outcome.failures
    for rank in range(2):
        told = (stacks.folder(Run(tmp_path), 1) / f"rank-{rank:05d}.txt").read_text()
        assert "in asks" in told


def test_records_of_old_generations_are_let_go(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for generation in range(1, 9):
        flight.save(run, generation, 0, bytes(flight.BYTES))
    with black_box.BlackBox(run, 1, new_memory) as box:
        box.begin(9, 0, 1)
    assert list(flight.generations(run)) == [6, 7, 8]


def test_a_stop_that_ranks_had_no_time_to_note_is_noted(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with black_box.BlackBox(run, 1, new_memory) as box:
        box.begin(3, 0, 1)
        box.over((), 5)
        assert not flight.was_stopped(run, 3)
        box.over((), 5, asked=True)
    assert flight.was_stopped(run, 3)
    assert list(flight.generations(run)) == [3]
    assert flight.read(run, 3) == {}
