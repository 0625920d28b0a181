"""Ranks on this machine: torch is imported once, then every rank is forked from that warm process.

The warm process runs no tensor operation and touches no CUDA before it forks: neither OpenMP's threads nor a CUDA
context survives one. It then hosts the ranks' store, waits for them, and sees to it that none outlives the job.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from phalanx import traces
from phalanx.cluster import cores, threads
from phalanx.errors import CannotHere, WrongUse, may_pass
from phalanx.launch import blame, environment, network
from phalanx.launch.key import Key
from phalanx.launch.lines import not_for_children
from phalanx.launch.printing import Printing
from phalanx.launch.rank_store import RankStore, StoreServer
from phalanx.launch.stopping import ENDING, HANDED_ON, Stop, handled, note_requests
from phalanx.parallel.torch_private import preload
from phalanx.processes import die_with_parent
from phalanx.redact import redact, refresh

GRACE_SECONDS = 1.0
"""How long the others may take to report, once a rank has failed,"""
SIGNAL_SECONDS = 0.05
"""and once one was killed, which needs no explanation."""
LOOK_SECONDS = 0.1
LEFT = "left with exit code 0 before the end, by os._exit in user code perhaps"


@dataclass(frozen=True)
class Failure:
    """How one rank ended badly."""

    rank: int
    when: float
    reason: str
    """One line."""
    trace: str = ""
    """The user's lines, and what was noted with the error."""
    whole: str = ""
    """All of the traceback."""
    file: str = ""
    """Where that is written down."""
    code: int = 1
    final: bool = False
    """Starting again would not help."""
    by_signal: bool = False
    secondary: bool = False
    """It lost sight of other ranks: something happened to those."""
    timed_out: bool = False
    """It did so since it waited for them until its time was up."""
    stuck: bool = False
    """It did not end, and did not go on either."""
    worker_killed: bool = False
    """Not it, but a process that reads data for it."""
    may_pass: bool = False
    """It failed by storage or a network."""


@dataclass
class HostOutcome:
    """How a job on this machine ended: what rank 0 returned, or who failed, the first to fail first."""

    result: Any = None
    failures: list[Failure] | None = None
    interrupted: bool = False
    """Somebody asked for it to end; it may have come to its own end all the same."""
    over: str = ""
    """Why ranks that were well were stopped: the world has changed."""

    @property
    def finished(self) -> bool:
        """Whether ranks came to the program's own end, asked to stop or not."""
        return self.result is not None and not getattr(self.result, "stopped", False)


@dataclass(frozen=True)
class World:
    """Where the ranks of this host stand among all."""

    ranks: int
    """On this host."""
    first: int = 0
    size: int = 0
    """Of all hosts together; 0: this host is alone."""
    hosts: str = ""
    """How many ranks each host has."""
    address: str = "127.0.0.1"
    port: int = 0
    """Of the store where ranks find each other; 0: this host makes one for its own."""
    listening: socket.socket | None = None
    """The socket behind that address, on the host that opens the store."""
    key: Key = field(default_factory=Key)
    """What lets ranks in there."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Those that tell gloo and NCCL through which interface the other hosts are reached."""


Look = Callable[[dict[int, int]], "Failure | str | None"]
"""Given the processes by rank: one that is stuck, or why all must stop, or None."""


def run_ranks(
    program: Callable[[], Any],
    ranks: int | World,
    look: Look | None = None,
    stop: Stop | None = None,
    missed: Callable[[dict[int, int]], object] = lambda pids: None,
    forked: Callable[[], object] = lambda: None,
) -> HostOutcome:
    """Run ``program`` on this host's ranks and wait for all of them. ``forked`` is called when all have begun.

    When one has waited for others until its time was up, ``missed`` is told who still runs, before they are ended.

    SIGTERM, SIGINT and SIGHUP are handed on to the ranks, which have the time that ``stop`` gives them to end well,
    however often they are asked. SIGUSR1 is handed on.
    """
    stop = stop or Stop(GRACE_SECONDS)
    world = ranks if isinstance(ranks, World) else World(ranks)
    preload()
    frozen = gc.get_freeze_count()  # by who starts ranks again and again
    gc.collect()
    gc.freeze()  # the ranks share this memory as long as nobody touches it
    listening = world.listening
    if not world.port:
        listening = network.listen_alone()
        address, port = listening.getsockname()[:2]
        through = network.variables(network.interface_of(address))
        world = replace(world, address=address, port=port, variables=through)
    if listening is not None:
        not_for_children(listening)
    context = multiprocessing.get_context("fork")
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    asked, ask = os.pipe()
    sys.stdout.flush()
    store = printing = None
    undo = ExitStack()
    try:
        if (world.size or world.ranks) > 1:
            printing = Printing(world.ranks, world.first)
        # a note, not an exception: one raised inside a destructor or a weak reference's callback would be lost
        undo.enter_context(handled(HANDED_ON, lambda number, frame: _write(ask, number)))
        for rank in range(world.ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(program, rank, world, theirs, printing), name=f"rank {rank}")
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        if listening is not None and (world.size or world.ranks) > 1:
            store = StoreServer(listening, world.key, world.size or world.ranks)
        if printing is not None:
            printing.start()
        forked()
        outcome = _supervise(processes, pipes, asked, world.first, look, stop, missed)
        _end(processes)
        while wait([asked], timeout=0):  # asked while the others were being ended
            for number in os.read(asked, 64):
                stop.heard(number)
        return replace(outcome, interrupted=stop.asked)
    finally:
        _end(processes)
        if printing is not None:
            printing.close()
        if store is not None:
            store.close()
        if listening is not None:
            listening.close()
        for pipe in pipes:
            pipe.close()
        undo.close()
        os.close(asked)
        os.close(ask)
        if not frozen:
            gc.unfreeze()


def _write(pipe: int, number: int) -> None:
    os.write(pipe, bytes([number]))


def _supervise(
    processes: list[BaseProcess], pipes: list[Connection], asked: int, first: int, look: Look | None, stop: Stop,
    missed: Callable[[dict[int, int]], object],
) -> HostOutcome:  # fmt: skip
    """Wait for every rank; once one has failed, for the others' own reports and no longer."""
    running = dict(enumerate(processes, first))
    open_pipes = dict(enumerate(pipes, first))
    reports: dict[int, Any] = {}
    failures: dict[int, Failure] = {}
    starved = blame.starved_processes()
    deadline = math.inf  # from the first failure on
    for process in processes if stop.asked else ():  # before there were ranks
        _hand_on(process, signal.SIGTERM)
    while running and time.monotonic() < (end := min(deadline, stop.deadline)):
        # for a while at most: a signal that another thread of this process got is noted, and wakes nobody
        patience = min(LOOK_SECONDS, max(0.0, end - time.monotonic()))
        sentinels = [process.sentinel for process in running.values()]
        if asked in wait([asked, *sentinels, *open_pipes.values()], timeout=patience):
            for number in os.read(asked, 64):
                if stop.heard(number) and stop.left:
                    print(stop.told(), file=sys.stderr, flush=True)
                for process in running.values():
                    _hand_on(process, number)
        for rank in list(open_pipes):
            _heard(rank, open_pipes, reports)
        for rank, process in list(running.items()):
            if process.exitcode is not None:
                del running[rank]
                _heard(rank, open_pipes, reports)  # what it said last
                failure = _failure(rank, process.exitcode, reports.get(rank), starved)
                if failure is None and rank not in reports:
                    failure = Failure(rank, time.monotonic(), LEFT)
                if failure:
                    if failure.timed_out and not failures:
                        missed({rank: process.pid for rank, process in running.items() if process.pid})
                    failures[rank] = failure
                    patience = SIGNAL_SECONDS if failure.by_signal else GRACE_SECONDS
                    deadline = min(deadline, time.monotonic() + patience)
        if look and not failures and not stop.asked and running:
            seen = look({rank: process.pid for rank, process in running.items() if process.pid})
            if isinstance(seen, Failure):
                failures[seen.rank] = seen
                break
            if seen:
                return HostOutcome(over=seen)
    if not failures:
        if running and stop.given:
            stop.cut_short = stop.cut_short or f"after the {stop.given:g} s of --grace"
        return HostOutcome(result=None if running else reports.get(first))
    silent = [Failure(rank, float("inf"), "was stopped") for rank in running if rank not in failures]
    ordered = sorted(failures.values(), key=lambda f: (f.secondary, not f.by_signal, f.when)) + silent
    return HostOutcome(failures=ordered)


def _heard(rank: int, pipes: dict[int, Connection], reports: dict[int, Any]) -> None:
    """What a rank has said by now, if anything."""
    if rank in pipes and pipes[rank].poll():
        try:
            reports[rank] = pickle.loads(pipes[rank].recv_bytes())
        except (EOFError, OSError):  # also where it was killed while it said something
            del pipes[rank]


def _hand_on(process: BaseProcess, number: int) -> None:
    """A signal for a rank; one that a terminal gives to everybody, as a plain request to end."""
    with suppress(ProcessLookupError):
        os.kill(process.pid or 0, signal.SIGTERM if number in ENDING else number)


def _failure(rank: int, exitcode: int, report: Any, starved: int | None) -> Failure | None:
    """``starved``: how many processes the system had ended for want of memory when the ranks began."""
    if isinstance(report, Failure):
        return report
    if exitcode < 0:
        now = blame.starved_processes()
        reason, secondary = blame.ended_by(-exitcode, None if starved is None or now is None else now > starved)
        return Failure(rank, time.monotonic(), reason, by_signal=True, secondary=secondary)
    if exitcode:
        return Failure(rank, time.monotonic(), f"left with exit code {exitcode}")
    return None


def _raised(rank: int, error: Exception | SystemExit) -> Failure:
    """What a rank says of its end, without the secrets that it knows: its supervisor may know fewer."""
    refresh()
    told = _described(rank, error)
    return replace(told, reason=redact(told.reason), trace=redact(told.trace), whole=redact(told.whole))


def _described(rank: int, error: Exception | SystemExit) -> Failure:
    if isinstance(error, SystemExit):
        left = f"left by sys.exit({error.code if error.code is not None else ''}) before the end"
        return Failure(rank, time.monotonic(), left, traces.folded(error), traces.whole(error))
    final = isinstance(error, (WrongUse, CannotHere))
    return Failure(
        rank, time.monotonic(), blame.reason(error), traces.folded(error), traces.whole(error),
        code=error.exit_code if isinstance(error, (WrongUse, CannotHere)) else 1, final=final,
        secondary=blame.secondary(error), timed_out=blame.timed_out(error), worker_killed=blame.worker_killed(error),
        may_pass=may_pass(error),
    )  # fmt: skip


def _end(processes: list[BaseProcess]) -> None:
    """Stop what still runs, at once: a rank may wait in a collective that nothing but its end will end."""
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()
        process.close()
    processes.clear()


def _rank(program: Callable[[], Any], local: int, world: World, pipe: Connection, printing: Printing | None) -> None:
    """A rank's whole life."""
    die_with_parent()
    note_requests()
    if printing is not None:
        printing.in_rank(local)
    rank, ranks = world.first + local, world.ranks
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world.size or ranks), "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(ranks), "PHALANX_HOSTS": world.hosts or str(ranks), "MASTER_ADDR": world.address,
        "MASTER_PORT": str(world.port), **world.variables,
    }  # fmt: skip
    environment.find_others_by(partial(RankStore, world.address, world.port, world.key))
    try:
        torch.set_num_threads(threads(max(1, cores() // ranks)))
        pipe.send_bytes(pickle.dumps(program()))
    except (Exception, SystemExit) as error:
        pipe.send_bytes(pickle.dumps(_raised(rank, error)))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # not through destructors that would wait for the others
    pipe.close()
