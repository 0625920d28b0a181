"""Who is to blame, by what is left of a rank: words of gloo, of NCCL and of a store, and signals."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from phalanx import WrongUse
from phalanx.launch import blame
from phalanx.launch.local import run_ranks


@pytest.mark.parametrize("error", [
    RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"),
    dist.DistBackendError("NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error, NCCL"),
    dist.DistBackendError("NCCL error in: x.cpp:1, ncclRemoteError: A call failed possibly due to a network error"),
    dist.DistBackendError("NCCL communicator was aborted on rank 2."),
    dist.DistNetworkError("failed to recv, got 0 bytes. Connection was likely closed."),
])  # fmt: skip
def test_whoever_lost_a_rank_says_so(error: Exception) -> None:
    assert blame.reason(error) == "lost its connection to a rank that ended"
    assert blame.secondary(error)


@pytest.mark.parametrize("error", [
    RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 60000ms for recv"),
    dist.DistBackendError(
        "NCCL communicator was aborted on rank 3. Original reason for failure was: [Rank 3] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum=2070, OpType=REDUCE) ran for 600068 milliseconds before timing out."
    ),
    dist.DistStoreError("wait timeout after 600000ms, keys: /default_pg/0//cuda//0"),
])  # fmt: skip
def test_whoever_waited_in_vain_says_so(error: Exception) -> None:
    assert blame.reason(error).startswith("waited for another rank until its time was up")
    assert blame.secondary(error)


@pytest.mark.parametrize("error", [
    KeyError("the cause"),
    dist.DistBackendError("NCCL error in: x.cpp:1, unhandled cuda error, NCCL version 2.28.9"),
    dist.DistBackendError("NCCL error in: x.cpp:1, invalid usage (run with NCCL_DEBUG=WARN for details)"),
    RuntimeError("CUDA out of memory"),
    TimeoutError("the data's server timed out"),
    WrongUse("Timed out is a word here. Do this."),
])  # fmt: skip
def test_a_mistake_of_its_own_is_none_of_the_others(error: Exception) -> None:
    assert not blame.secondary(error)


def test_a_worker_that_was_killed_is_told_from_a_mistake() -> None:
    assert blame.worker_killed(RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed."))
    assert not blame.worker_killed(RuntimeError("a worker"))
    assert not blame.worker_killed(WrongUse("DataLoader worker is a word here. Do this."))


def one_raises_and_another_aborts() -> None:
    if os.environ["RANK"] == "1":
        time.sleep(0.3)
        faulthandler.disable()
        os.abort()  # as NCCL's watchdog does where it misses a rank
    raise KeyError("the cause")


def test_an_abort_is_blamed_on_the_rank_that_failed() -> None:
    outcome = run_ranks(one_raises_and_another_aborts, 2)
    assert outcome.failures is not None
    assert (outcome.failures[0].rank, outcome.failures[0].reason) == (0, "KeyError: 'the cause'")


def test_an_abort_alone_is_told_as_one() -> None:
    said, secondary = blame.ended_by(signal.SIGABRT)
    assert said.startswith("was ended by SIGABRT (NCCL")
    assert secondary


def test_memory_is_blamed_where_it_may_have_run_out() -> None:
    said = [blame.ended_by(signal.SIGKILL, starved)[0] for starved in (True, None, False)]
    assert ["memory runs out" in words for words in said] == [True, True, False]
    assert said[2] == "was ended by SIGKILL (by another process, not for want of memory)"


def test_the_systems_own_count_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = blame.starved_processes()
    assert before is None or before >= 0
    (tmp_path / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    monkeypatch.setattr(blame, "_own_group", lambda: tmp_path)
    monkeypatch.setattr(blame, "COUNTED", tmp_path / "nowhere")
    assert blame.starved_processes() == 2
    (tmp_path / "memory.events").unlink()
    assert blame.starved_processes() is None
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    assert blame.starved_processes() == 4


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_another_process_killed_did_not_run_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blame, "starved_processes", lambda: 7)
    outcome = run_ranks(killed, 1)
    assert outcome.failures is not None
    assert outcome.failures[0].reason == "was ended by SIGKILL (by another process, not for want of memory)"
