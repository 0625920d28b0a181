"""Ranks on this machine: torch is imported once, then every rank is forked from that warm process.

The warm process runs no tensor operation and touches no CUDA before it forks: neither OpenMP's threads nor a CUDA
context survives one. It then hosts the ranks' store, waits for them, and sees to it that none outlives the job.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from phalanx.errors import CannotHere, WrongUse
from phalanx.parallel.torch_private import preload
from phalanx.processes import die_with_parent

GRACE_SECONDS = 1.0
"""How long the others may take to report, once a rank has failed, and then to end."""


@dataclass(frozen=True)
class Failure:
    """How one rank ended badly."""

    rank: int
    when: float
    reason: str
    """One line."""
    trace: str = ""
    code: int = 1
    by_signal: bool = False


@dataclass
class Outcome:
    """How a job on this machine ended: what rank 0 returned, or who failed, the first to fail first."""

    result: Any = None
    failures: list[Failure] | None = None
    interrupted: bool = False


def run_ranks(program: Callable[[], Any], ranks: int) -> Outcome:
    """Run ``program`` on so many ranks and wait for all of them."""
    preload()
    gc.collect()
    gc.freeze()  # the ranks share this memory as long as nobody touches it
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    context = multiprocessing.get_context("fork")
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    asked, ask = os.pipe()
    # a note, not an exception: one raised inside a destructor or a weak reference's callback would be lost
    previous = {number: signal.signal(number, _noting(ask)) for number in (signal.SIGINT, signal.SIGTERM)}
    sys.stdout.flush()
    try:
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(program, rank, ranks, port, theirs), name=f"rank {rank}")
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        store = None
        if ranks > 1:
            store = dist.TCPStore(
                "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
            )
        outcome = _supervise(processes, pipes, asked)
        del store
        return outcome
    finally:
        _end(processes)
        listening.close()
        for pipe in pipes:
            pipe.close()
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.close(asked)
        os.close(ask)
        gc.unfreeze()


def _noting(ask: int) -> Callable[[int, FrameType | None], None]:
    """A signal's handler that says so through a pipe."""

    def note(number: int, frame: FrameType | None) -> None:
        os.write(ask, b"!")

    return note


def _supervise(processes: list[BaseProcess], pipes: list[Connection], asked: int) -> Outcome:
    """Wait for every rank; once one has failed, for the others' own reports and no longer; not if ``asked`` to end."""
    running = dict(enumerate(processes))
    open_pipes = dict(enumerate(pipes))
    reports: dict[int, Any] = {}
    failures: dict[int, Failure] = {}
    deadline: float | None = None
    while running and (deadline is None or time.monotonic() < deadline):
        patience = None if deadline is None else max(0.0, deadline - time.monotonic())
        sentinels = [process.sentinel for process in running.values()]
        if asked in wait([asked, *sentinels, *open_pipes.values()], timeout=patience):
            return Outcome(interrupted=True)
        for rank, pipe in list(open_pipes.items()):
            if pipe.poll():
                try:
                    reports[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    del open_pipes[rank]
        for rank, process in list(running.items()):
            if process.exitcode is not None:
                del running[rank]
                failure = _failure(rank, process.exitcode, reports.get(rank))
                if failure:
                    failures[rank] = failure
                    deadline = deadline or time.monotonic() + GRACE_SECONDS
    if not failures:
        return Outcome(result=reports.get(0))
    silent = [Failure(rank, float("inf"), "was stopped") for rank in running]
    ordered = sorted(failures.values(), key=lambda f: (not f.by_signal, f.when)) + silent
    return Outcome(failures=ordered)


def _failure(rank: int, exitcode: int, report: Any) -> Failure | None:
    if isinstance(report, Failure):
        return report
    if exitcode < 0:
        name = signal.Signals(-exitcode).name
        hint = " (the system ends a process so when memory runs out)" if name == "SIGKILL" else ""
        return Failure(rank, time.monotonic(), f"was ended by {name}{hint}", by_signal=True)
    if exitcode:
        return Failure(rank, time.monotonic(), f"left with exit code {exitcode}")
    return None


def _end(processes: list[BaseProcess]) -> None:
    """Stop what still runs: first asked, then made to."""
    for stop in (BaseProcess.terminate, BaseProcess.kill):
        for process in processes:
            if process.is_alive():
                stop(process)
        deadline = time.monotonic() + GRACE_SECONDS
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()) if stop is BaseProcess.terminate else None)
    for process in processes:
        process.close()


def _rank(program: Callable[[], Any], rank: int, ranks: int, port: int, pipe: Connection) -> None:
    """A rank's whole life."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the warm process decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // ranks))
    torch.set_num_threads(int(threads))
    try:
        pipe.send_bytes(pickle.dumps(program()))
    except Exception as error:
        code = error.exit_code if isinstance(error, (WrongUse, CannotHere)) else 1
        pipe.send_bytes(pickle.dumps(Failure(rank, time.monotonic(), _reason(error), traceback.format_exc(), code)))
        sys.stdout.flush()
        os._exit(1)  # not through destructors that would wait for the others
    pipe.close()


def _reason(error: Exception) -> str:
    text = str(error)
    if isinstance(error, (WrongUse, CannotHere)):
        return text
    if "imed out waiting" in text or "Timed out" in text:
        return f"waited for another rank until its time was up ({text.splitlines()[0][:80]}); look at the others first"
    if "Connection closed by peer" in text or "Connection reset by peer" in text:
        return "lost its connection to a rank that ended"
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
