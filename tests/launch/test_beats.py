"""Signs of life: how long a rank may stand still, and who is named when it stands still for longer."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from phalanx.launch import beats
from phalanx.launch.beats import ALLOWED, LAUNCHED, MOVES, Beat, Beats, Watch


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beats, "LEAST_SECONDS", 0.2)


def look_for(watch: Watch, pids: dict[int, int], seconds: float) -> tuple[int, str] | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        seen = watch.look(pids)
        if seen is not None:
            return seen
        time.sleep(0.02)
    return None


def test_a_rank_learns_from_its_own_steps_how_long_it_may_take() -> None:
    shared = Beats(1)
    beat = Beat(shared.row(0), patience=600)
    assert shared.row(0)[ALLOWED] == 600_000
    for step in range(1, 8):
        beat.stepped(step)
        time.sleep(0.01)
    assert shared.row(0)[ALLOWED] == 5_000  # ten times its median would be less
    assert shared.steps() == 7
    beat._seconds.extend([2.0] * 32)
    beat.stepped(8)
    assert shared.row(0)[ALLOWED] == pytest.approx(20_000, rel=0.1)
    beat.unhurried()
    assert shared.row(0)[ALLOWED] == 600_000


def test_no_more_than_the_patience_is_ever_allowed() -> None:
    beat = Beat(Beats(1).row(0), patience=3)
    for step in range(1, 6):
        beat.stepped(step)
    assert beat.row[ALLOWED] == 3_000


def test_the_rank_that_launched_fewest_collectives_is_named(quick: None) -> None:
    shared = Beats(3)
    for rank, launched in enumerate((40, 38, 40)):
        row = shared.row(rank)
        row[MOVES], row[ALLOWED], row[LAUNCHED] = 1, 200, launched
    seen = look_for(Watch(shared), dict.fromkeys(range(3), os.getpid()), 5)
    assert seen is not None
    assert seen[0] == 1
    assert "rank 0, 2 waits for it" in seen[1]


def test_where_all_wait_in_the_same_collective_the_network_is(quick: None) -> None:
    shared = Beats(2)
    for rank in range(2):
        shared.row(rank)[ALLOWED] = 200
    seen = look_for(Watch(shared, first=6), dict.fromkeys((6, 7), os.getpid()), 5)
    assert seen is not None
    assert seen[0] == 6
    assert "network" in seen[1]


def test_a_stopped_process_is_told_from_a_slow_one(quick: None) -> None:
    shared = Beats(2)
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
    shared = Beats(1)
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
