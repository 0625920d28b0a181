"""A pool of ranks: forked once from this process, over gloo on this machine, and given one job after another.

What this process holds when the pool is made, the ranks hold too. It should compute with one thread until then:
OpenMP's threads do not survive a fork.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from phalanx.parallel.torch_private import preload
from phalanx.processes import die_with_parent

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

    def __init__(self, size: int, timeout: timedelta, after: Callable[[int], None] | None = None) -> None:
        """``after`` is called with the world's size on each rank after its job, and may complain by raising."""
        self.size, self.timeout, self.after = size, timeout, after
        self.patience: float | None = 2 * timeout.total_seconds()
        """How long to wait for the first answer; None: as long as it takes, since ranks that wait say so in time."""
        preload()
        self._start()

    def _start(self) -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        self.jobs = 0
        context = multiprocessing.get_context("fork")
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        sys.stdout.flush()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=self._serve, args=(rank, theirs), name=f"rank {rank}")
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.store = dist.TCPStore(
            "127.0.0.1", self.port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )

    def ask(self, world: int, function: Callable[..., Any], *args: Any) -> list[Answer]:
        """By rank. Ranks that wait for one that failed cannot be used again, and are replaced."""
        self.jobs += 1
        message = pickle.dumps((self.jobs, world, function, args))
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
        for process in self.processes:
            process.kill()
            process.join()
            process.close()

    def _serve(self, rank: int, pipe: Connection) -> None:
        """A rank's whole life."""
        die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the pool's owner decides
        for other in self.pipes:
            other.close()
        gc.freeze()  # what was there before the fork need not be searched for garbage after every job
        torch.set_num_threads(1)
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = None
        while True:
            try:
                number, world, function, args = pickle.loads(pipe.recv_bytes())
            except EOFError:
                return
            if store is None:
                store = dist.TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False)
            pipe.send_bytes(self._job(rank, dist.PrefixStore(f"job {number}", store), world, function, args))

    def _job(self, rank: int, store: dist.Store, world: int, function: Callable[..., Any], args: Any) -> bytes:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        before = {name: os.environ.pop(name, None) for name in names}
        if world > 1:
            os.environ |= {name: str(value) for name, value in names.items()}
        try:
            if world > 1:
                dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=self.timeout)
            answer = pickle.dumps(Answer(rank, function(*args)))  # not send(): torch would share file descriptors
            if self.after is not None:
                self.after(world)
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
