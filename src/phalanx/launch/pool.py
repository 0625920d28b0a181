"""A pool of ranks: forked once by a fork server, over gloo on this machine, and given one job after another."""

from __future__ import annotations

import gc
import os
import pickle
import secrets
import signal
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import torch
import torch.distributed as dist

from phalanx.launch import network
from phalanx.launch.forkserver import Forked, ForkServer, loads
from phalanx.launch.key import Key
from phalanx.launch.lines import not_for_children
from phalanx.launch.rank_store import RankStore, StoreServer

PATIENCE_SECONDS = 3.0
"""How long the others may take to answer, once a rank has failed."""


@dataclass(frozen=True)
class Answer:
    """What became of a job on one rank."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    """Not empty: the job failed there."""
    gone: bool = False
    """It died, or gave no answer in time."""

    @property
    def failed(self) -> bool:
        return self.gone or bool(self.trace)


class Pool:
    """``ask(world, function, *args)`` runs a function on the first ranks and returns what each of them gave."""

    def __init__(
        self,
        server: ForkServer,
        size: int,
        timeout: timedelta,
        after: Callable[[int], None] | None = None,
        begin: tuple[Callable[..., None], Any] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        """``after`` is called with the world's size on each rank after its job, and may complain by raising.

        ``begin`` is a function that each rank calls first, with something to be told, and with ``descriptors``, which
        are those of the same files there.
        """
        self.server, self.size, self.timeout, self.after, self.descriptors = server, size, timeout, after, descriptors
        self.begin = server.dumps(begin)
        self.patience: float | None = 2 * timeout.total_seconds()
        """How long to wait for the first answer; None: as long as it takes, since ranks that wait say so in time."""
        self._start()

    def _start(self) -> None:
        listening = not_for_children(network.listen_alone())
        address, port = listening.getsockname()[:2]
        secret = secrets.token_bytes(32)
        self.jobs = 0
        self.pipes: list[Connection] = []
        self.processes: list[Forked] = []
        for rank in range(self.size):
            ours, theirs = Pipe()
            given = [theirs.fileno(), *self.descriptors]
            fixed = rank, address, port, secret, self.timeout, self.after, self.begin
            self.processes.append(self.server.fork(_serve, *fixed, descriptors=given))
            theirs.close()
            self.pipes.append(ours)
        self.store = StoreServer(listening, Key(secret), self.size)

    def ask(self, world: int, function: Callable[..., Any], *args: Any) -> list[Answer]:
        """By rank. Ranks that wait for one that failed cannot be used again, and are replaced."""
        self.jobs += 1
        message = pickle.dumps((self.jobs, world, self.server.dumps((function, args))))
        for pipe in self.pipes[:world]:
            with suppress(OSError):  # a rank that has died gives no answer
                pipe.send_bytes(message)
        answers = self._answers(world)
        if any(answer.gone for answer in answers):
            self.close()
            self._start()
        return answers

    def _answers(self, world: int) -> list[Answer]:
        found = {rank: Answer(rank, gone=True) for rank in range(world)}
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes[:world])}
        patience = self.patience
        while waiting and (ready := wait(list(waiting), timeout=patience)):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                with suppress(EOFError, OSError):
                    found[rank] = pickle.loads(pipe.recv_bytes())
                if found[rank].failed:
                    patience = PATIENCE_SECONDS
        return list(found.values())

    def close(self) -> None:
        """End the ranks."""
        for pipe in self.pipes:
            pipe.close()
        try:
            for process in self.processes:
                process.kill()
        finally:
            self.store.close()


def _serve(
    rank: int,
    address: str,
    port: int,
    secret: bytes,
    timeout: timedelta,
    after: Callable[[int], None] | None,
    begin: bytes,
    pipe: int,
    *descriptors: int,
) -> None:
    """A rank's whole life."""
    connection = Connection(pipe)
    for number in (signal.SIGINT, signal.SIGHUP):  # they reach the whole terminal; the pool's owner decides
        signal.signal(number, signal.SIG_IGN)
    gc.freeze()  # what was there before the fork need not be searched for garbage after every job
    torch.set_num_threads(1)
    os.environ |= network.variables(network.interface_of(address))
    if (beginning := loads(begin)) is not None:
        function, told = beginning
        function(told, *descriptors)
    store = None
    while True:
        try:
            number, world, work = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            return
        if store is None:
            store = RankStore(address, port, Key(secret), timeout)
        answer = _job(rank, dist.PrefixStore(f"job {number}", store), world, timeout, after, work)
        try:
            connection.send_bytes(answer)
        except ConnectionError:  # the pool was closed meanwhile, as when another rank did not answer
            return


def _job(
    rank: int,
    store: dist.Store,
    world: int,
    timeout: timedelta,
    after: Callable[[int], None] | None,
    work: bytes,
) -> bytes:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    before = {name: os.environ.pop(name, None) for name in names}
    if world > 1:
        os.environ |= {name: str(value) for name, value in names.items()}
    try:
        function, args = loads(work)
        if world > 1:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
            if store.add("connected", 1) == world:
                store.set("all connected", "yes")
            store.get("all connected")  # a job that says nothing would end, and break connections still being made
        answer = pickle.dumps(Answer(rank, function(*args)))  # not send(): torch would share file descriptors
        if after is not None:
            after(world)
        return answer
    except BaseException as error:
        return _failure(rank, error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _failure(rank: int, error: BaseException) -> bytes:
    trace = traceback.format_exc()
    try:
        answer = pickle.dumps(Answer(rank, error=error, trace=trace))
        pickle.loads(answer)
        return answer
    except Exception:  # an error that does not travel
        return pickle.dumps(Answer(rank, error=RuntimeError(f"{type(error).__name__}: {error}"), trace=trace))
