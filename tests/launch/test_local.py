"""Local ranks: forked warm, ended together, and never left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from phalanx import WrongUse
from phalanx.launch.environment import Environment
from phalanx.launch.local import run_ranks


def meet() -> tuple[int, int]:
    environment = Environment.detect()
    environment.join(environment.device("cpu"))
    dist.barrier()
    dist.destroy_process_group()
    return environment.rank, environment.world


def test_ranks_meet_and_rank_zero_answers() -> None:
    assert run_ranks(meet, 3).result == (0, 3)


def fail_on_one() -> None:
    environment = Environment.detect()
    environment.join(environment.device("cpu"))
    if environment.rank == 1:
        raise KeyError("the cause")
    dist.barrier()


def test_the_rank_that_failed_comes_first_with_its_traceback() -> None:
    outcome = run_ranks(fail_on_one, 3)
    assert outcome.failures is not None
    first, *others = outcome.failures
    assert (first.rank, first.reason) == (1, "KeyError: 'the cause'")
    assert "fail_on_one" in first.trace
    assert sorted(failure.rank for failure in others) == [0, 2]
    assert all("\n" not in failure.reason for failure in others)


def killed() -> None:
    environment = Environment.detect()
    environment.join(environment.device("cpu"))
    if environment.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_killed_rank_is_named_before_those_that_lost_it() -> None:
    outcome = run_ranks(killed, 3)
    assert outcome.failures is not None
    assert outcome.failures[0].rank == 2
    assert "SIGKILL" in outcome.failures[0].reason


def hang_after_failure() -> None:
    if os.environ["RANK"] == "0":
        raise WrongUse("wrong")
    time.sleep(60)


def test_ranks_that_hang_are_ended() -> None:
    started = time.monotonic()
    outcome = run_ranks(hang_after_failure, 2)
    assert outcome.failures is not None
    assert [(f.rank, f.code) for f in outcome.failures] == [(0, 2), (1, 1)]
    assert time.monotonic() - started < 20


def big_answer() -> str:
    return "x" * (1 << 20)


def test_a_large_answer_gets_through() -> None:
    assert len(run_ranks(big_answer, 2).result) == 1 << 20


def sleeper() -> None:
    os.write(int(os.environ["SAY"]), b"up\n")
    time.sleep(60)


def launcher(say: int) -> None:
    """What `phalanx train` is to its ranks, in a session of its own."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the suite itself may run under nohup
    os.environ["SAY"] = str(say)
    outcome = run_ranks(sleeper, 2)
    os.write(say, b"interrupted\n" if outcome.interrupted else b"not interrupted\n")


def descendants(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rsplit(")", 1)[1].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(path.parent.name))
    return found


def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_no_rank_outlives_the_process_that_forked_it(how: signal.Signals) -> None:
    reading, writing = os.pipe()
    process = multiprocessing.get_context("fork").Process(target=launcher, args=(writing,))
    process.start()
    os.close(writing)
    with os.fdopen(reading) as said:
        assert [said.readline() for _ in range(2)] == ["up\n", "up\n"]
        assert process.pid is not None
        ranks = descendants(process.pid)
        assert len(ranks) == 2
        if how in (signal.SIGINT, signal.SIGHUP):
            os.killpg(process.pid, how)  # as Ctrl-C does and a terminal that closes, to everybody in it
        else:
            os.kill(process.pid, how)
        rest = said.read()
    process.join(timeout=20)
    assert gone(ranks)
    if how is signal.SIGKILL:
        assert process.exitcode == -signal.SIGKILL
    else:
        assert (rest, process.exitcode) == ("interrupted\n", 0)
    process.close()


def hung_up() -> int:
    os.kill(os.getppid(), signal.SIGHUP)
    return 7


def test_under_nohup_a_closed_terminal_ends_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        outcome = run_ranks(hung_up, 1)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (outcome.result, outcome.interrupted) == (7, False)


def threads() -> int:
    import torch

    return torch.get_num_threads()


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert run_ranks(threads, 1).result == os.cpu_count()
    assert run_ranks(threads, 64).result == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    assert run_ranks(threads, 1).result == 3
