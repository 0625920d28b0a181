"""Stacks: of a process that is busy in C, of one that is stopped, of what a rank has forked, and of nobody else."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.errors import CannotHere
from phalanx.launch import stacks
from phalanx.run import Run
from tests.forking import fork


def asleep_in_the_data(memory: int, ready: int) -> None:
    stacks.answer(memory)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        reading_a_sample(ready)
    os.write(ready, b"1")
    time.sleep(60)
    os.kill(child, signal.SIGKILL)


def reading_a_sample(ready: int) -> None:
    os.write(ready, b"1")
    os.close(ready)
    time.sleep(60)


@pytest.fixture
def rank() -> Iterator[tuple[int, int]]:
    """A process with a child, and the memory that its stacks go to."""
    memory = os.memfd_create("stacks")
    ours, theirs = os.pipe()
    process = fork(asleep_in_the_data, descriptors=(memory, theirs))
    os.close(theirs)
    assert os.read(ours, 1) + os.read(ours, 1) == b"11"
    os.close(ours)
    assert process.pid is not None
    yield process.pid, memory
    for pid in reversed(list(stacks.family(process.pid))):
        os.kill(pid, signal.SIGKILL)
    process.join(timeout=10)
    process.close()
    os.close(memory)


def test_a_rank_and_what_it_has_forked_answer(rank: tuple[int, int]) -> None:
    for _ in range(2):  # as often as it is asked
        told = stacks.stacks_of(3, *rank)
        assert f"rank 3, process {rank[0]} on " in told
        assert "in asleep_in_the_data" in told
        assert ", started by rank 3 on " in told
        assert "in reading_a_sample" in told
        assert told.index("in asleep_in_the_data") < told.index("started by rank 3") < told.index("in reading_a_sample")


def test_one_that_is_stopped_is_said_to_be(rank: tuple[int, int]) -> None:
    os.kill(rank[0], signal.SIGSTOP)
    deadline = time.monotonic() + 5
    while stacks.state_of(rank[0]) != "T":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    told = stacks.stacks_of(3, *rank)
    assert "stopped (SIGSTOP), state T\nit cannot answer" in told
    assert "in reading_a_sample" in told
    os.kill(rank[0], signal.SIGCONT)


def test_who_does_not_listen_is_left_alone() -> None:
    other = subprocess.Popen(["sleep", "60"])
    memory = os.memfd_create("stacks")
    try:
        assert not stacks.hears(other.pid)
        assert "it cannot answer" in stacks.stacks_of(0, other.pid, memory)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
        os.close(memory)


def test_py_spy_is_asked_where_it_is_installed(
    rank: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "py-spy").write_text("#!/bin/sh\necho native frames of $4\n")
    (tmp_path / "py-spy").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    pid, memory = rank
    assert f"native frames of {pid}" in stacks.asked({3: pid}, {3: memory})[3]


def test_a_run_that_is_over_is_not_asked(tmp_path: Path) -> None:
    stacks.ask(Run(tmp_path))


def test_a_run_of_another_host_is_named(tmp_path: Path) -> None:
    with Run(tmp_path).held():
        (tmp_path / "lock").write_text("process 1 on far-away")
        with pytest.raises(CannotHere, match="process 1 on far-away, and no rank of it runs here"):
            stacks.ask(Run(tmp_path))
        assert "no rank of it runs here" in stacks.unanswered(Run(tmp_path))
