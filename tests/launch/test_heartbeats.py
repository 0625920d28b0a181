"""Signs of life: how long a rank may stand still, and who is named when it stands still for longer."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from phalanx.launch import heartbeats
from phalanx.launch.heartbeats import (
    AHEAD,
    ALLOWED,
    ARRIVED,
    MOVES,
    PATIENCE,
    WAITING,
    Heartbeats,
    RankHeartbeat,
    Watch,
)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "LEAST_SECONDS", 0.2)
    monkeypatch.setattr(heartbeats, "WINDOW_SECONDS", 0.3)


@pytest.fixture
def start() -> Iterator[Callable[..., int]]:
    """Starts processes that do something, and ends them."""
    processes = []

    def starting(*command: str) -> int:
        processes.append(subprocess.Popen(command, start_new_session=True))
        return processes[-1].pid

    yield starting
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)  # those that it has started, too
        process.wait()


SLEEPS = ("sleep", "60")
COMPUTES = ("timeout", "60", "sh", "-c", "while true; do :; done")
HAS_ONE_COMPUTE = ("sh", "-c", "timeout 60 sh -c 'while true; do :; done'; true")
Start = Callable[..., int]


def late(
    shared: Heartbeats, rank: int, arrived: int = 0, waiting: int = 0, ahead: int = 0, patience: int = 600_000
) -> None:
    """A rank that may stand still for 0.2 s."""
    row = shared.row(rank)
    row[MOVES], row[ALLOWED], row[PATIENCE] = 1, 200, patience
    row[ARRIVED], row[WAITING], row[AHEAD] = arrived, waiting, ahead


def look_for(watch: Watch, pids: dict[int, int], seconds: float) -> tuple[int, str] | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        seen = watch.look(pids)
        if seen is not None:
            return seen
        time.sleep(0.02)
    return None


def test_a_rank_learns_from_its_own_steps_how_long_it_may_take() -> None:
    shared = Heartbeats(1)
    heartbeat = RankHeartbeat(shared.row(0), patience=600)
    assert shared.row(0)[ALLOWED] == 600_000
    for step in range(1, 8):
        heartbeat.stepped(step)
        time.sleep(0.01)
    assert shared.row(0)[ALLOWED] == 5_000  # ten times its median would be less
    assert shared.steps() == 7
    heartbeat._seconds.extend([2.0] * 32)
    heartbeat.stepped(8)
    assert shared.row(0)[ALLOWED] == pytest.approx(20_000, rel=0.1)
    heartbeat.may_take_long()
    assert shared.row(0)[ALLOWED] == 600_000


def test_samples_may_come_slowly() -> None:
    heartbeat = RankHeartbeat(Heartbeats(1).row(0), patience=600)
    for step in range(1, 8):
        heartbeat.stepped(step)
    with heartbeat.fetching():
        assert heartbeat.row[ALLOWED] == 600_000
    assert heartbeat.row[ALLOWED] == 5_000


def test_no_more_than_the_patience_is_ever_allowed() -> None:
    heartbeat = RankHeartbeat(Heartbeats(1).row(0), patience=3)
    for step in range(1, 6):
        heartbeat.stepped(step)
    assert heartbeat.row[ALLOWED] == 3_000


def test_the_rank_that_came_to_fewest_collectives_is_named(quick: None, start: Start) -> None:
    shared = Heartbeats(3)
    for rank, arrived in enumerate((40, 38, 40)):
        late(shared, rank, arrived)
    seen = look_for(Watch(shared), {rank: start(*SLEEPS) for rank in range(3)}, 5)
    assert seen is not None
    assert seen[0] == 1
    assert "rank 0, 2 waits for it" in seen[1]


def test_a_rank_that_waits_in_a_collective_is_not_to_blame(quick: None, start: Start) -> None:
    """The other has come to more of them, as stages of a pipeline do, and then to nothing."""
    shared = Heartbeats(2)
    late(shared, 0, arrived=7, waiting=1)
    late(shared, 1, arrived=9)
    seen = look_for(Watch(shared), {rank: start(*SLEEPS) for rank in range(2)}, 5)
    assert seen is not None
    assert seen[0] == 1
    assert "rank 0 waits for it" in seen[1]


def test_a_gpu_that_is_behind_with_what_was_launched_waits_for_another(quick: None, start: Start) -> None:
    """Both hosts have launched the same; the processor of one is at work, but only to ask again and again."""
    shared = Heartbeats(2)
    late(shared, 0, arrived=12, ahead=28)
    late(shared, 1, arrived=11, ahead=29)
    seen = look_for(Watch(shared), {0: start(*SLEEPS), 1: start(*COMPUTES)}, 5)
    assert seen is not None
    assert seen[0] == 1
    assert "rank 0 waits for it" in seen[1]


def test_where_all_wait_in_the_same_collective_the_network_is(quick: None, start: Start) -> None:
    shared = Heartbeats(2)
    for rank in range(2):
        late(shared, rank, waiting=1)
    pids = {rank: start(*SLEEPS) for rank in (6, 7)}
    seen = look_for(Watch(shared, first=6), pids, 5)
    assert seen is not None
    assert seen[0] == 6
    assert "network" in seen[1]
    assert look_for(Watch(shared, first=6, alone=False), pids, 1) is None  # they may wait for one of another host


@pytest.mark.parametrize("command", [COMPUTES, HAS_ONE_COMPUTE])
def test_slow_is_not_stuck(quick: None, start: Start, command: tuple[str, ...]) -> None:
    """A first compile, or a batch of a new shape: others wait, the rank or a process that it started computes."""
    shared = Heartbeats(2)
    late(shared, 0, arrived=5, waiting=1)
    late(shared, 1, arrived=4)
    pids = {0: start(*SLEEPS), 1: start(*command)}
    assert look_for(Watch(shared), pids, 1.5) is None
    shared.row(1)[PATIENCE] = 500
    seen = look_for(Watch(shared), pids, 5)  # but not for ever
    assert seen is not None
    assert seen[0] == 1


def test_whoever_said_that_it_takes_long_is_waited_for(quick: None, start: Start) -> None:
    """It evaluates, or writes a file, and the others have not been told."""
    shared = Heartbeats(2)
    late(shared, 0, arrived=5, waiting=1)
    late(shared, 1, arrived=4)
    shared.row(1)[ALLOWED] = 0
    assert look_for(Watch(shared), {rank: start(*SLEEPS) for rank in range(2)}, 1) is None


def test_collectives_within_a_step_are_signs_of_life(quick: None, start: Start) -> None:
    shared = Heartbeats(1)
    late(shared, 0)
    watch, pids = Watch(shared), {0: start(*SLEEPS)}
    for _ in range(10):
        assert look_for(watch, pids, 0.1) is None
        shared.row(0)[ARRIVED] += 1


def test_a_stopped_process_is_told_from_a_slow_one(quick: None) -> None:
    shared = Heartbeats(2)
    for rank in range(2):
        shared.row(rank)[ALLOWED] = 0  # as while a file is written, however long
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        pids = {0: os.getpid(), 1: sleeper.pid}
        assert look_for(Watch(shared), pids, 0.6) is None
        sleeper.send_signal(signal.SIGSTOP)
        seen = look_for(Watch(shared), pids, 5)
        assert seen is not None
        assert seen[0] == 1
        assert "SIGSTOP" in seen[1]
    finally:
        sleeper.kill()
        sleeper.wait()


def test_who_moves_is_left_alone_and_a_watch_that_slept_blames_nobody(quick: None) -> None:
    shared = Heartbeats(1)
    row = shared.row(0)
    row[ALLOWED] = 1500
    watch = Watch(shared)
    for _ in range(5):
        row[MOVES] += 1
        assert watch.look({0: os.getpid()}) is None
        time.sleep(0.02)
    watch.look({0: os.getpid()})
    watch._looked -= 100  # this process was suspended, and so were its ranks
    assert watch.look({0: os.getpid()}) is None


def test_a_rank_that_has_just_lost_what_it_waited_for_is_not_to_blame(quick: None, start: Start) -> None:
    """Another host ended its own rank, and this one is about to say that the connection is gone."""
    shared = Heartbeats(1)
    late(shared, 0, waiting=1)
    watch, pids = Watch(shared, alone=False), {0: start(*SLEEPS)}
    assert look_for(watch, pids, 1.0) is None
    shared.row(0)[WAITING] = 0
    assert watch.look(pids) is None
    assert look_for(watch, pids, 5) is not None  # not for ever
