"""The pool of ranks that every test uses: forked once, over gloo, and reused from test to test."""

from __future__ import annotations

import datetime
import gc
import multiprocessing
import os
import pickle
import socket
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from phalanx.parallel.torch_private import preload
from phalanx.processes import die_with_parent

TIMEOUT = datetime.timedelta(seconds=60)
SIZE = 8


class RankFailed(AssertionError):
    """A rank raised; carries its traceback."""


class Ranks:
    """``ranks(world, function, *args)`` runs a function on so many ranks and returns what each of them gave."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        preload()
        self._start()

    def _start(self) -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        self.jobs = 0
        context = multiprocessing.get_context("fork")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs, self.port), name=f"rank {rank}")
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.store = dist.TCPStore(
            "127.0.0.1", self.port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )

    def __call__(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        self.jobs += 1
        message = pickle.dumps((self.jobs, world, function, args))
        for pipe in self.pipes[:world]:
            pipe.send_bytes(message)
        answers = self._answers(world)
        failed = {rank: answer[1] for rank, answer in answers.items() if answer[0] != "fine"}
        if failed or len(answers) < world:
            silent = sorted(set(range(world)) - set(answers))
            if silent or any(answer[0] == "died" for answer in answers.values()):
                self.close()  # those that wait for a rank that failed cannot be used again
                self._start()
            text = "\n".join(f"rank {rank}:\n{trace}" for rank, trace in sorted(failed.items()))
            raise RankFailed(text + (f"\nno answer from ranks {silent}" if silent else ""))
        return [answers[rank][1] for rank in range(world)]

    def _answers(self, world: int) -> dict[int, Any]:
        """What each rank sent; once one has failed, the others get a second more."""
        answers: dict[int, Any] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes[:world])}
        patience = 2 * TIMEOUT.total_seconds()
        while waiting and (ready := wait(list(waiting), timeout=patience)):
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    answers[rank] = ("died", f"rank {rank} died")
                if answers[rank][0] != "fine":
                    patience = 1.0
        return answers

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()
            process.close()


def _serve(rank: int, pipe: Connection, port: int) -> None:
    die_with_parent()
    gc.freeze()  # what was there before the fork need not be searched for garbage after every job
    torch.set_num_threads(1)
    store = None
    while True:
        try:
            number, world, function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        if store is None:
            store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        threads, variables = threading.active_count(), dict(os.environ)
        try:
            if world > 1:
                prefixed = dist.PrefixStore(f"job {number}", store)
                dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=world, timeout=TIMEOUT)
            answer = ("fine", function(*args))
            gc.collect()
            _check_clean(threads, variables, world)
        except BaseException:
            answer = ("failed", traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send_bytes(pickle.dumps(answer))  # not send(): torch would share file descriptors


def _check_clean(threads: int, variables: dict[str, str], world: int) -> None:
    groups = len(dist.distributed_c10d._world.pg_map)
    assert groups <= (world > 1), f"{groups - 1} process groups were left behind"
    deadline = time.monotonic() + 2
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)  # a queue's thread ends a moment after the queue
    assert threading.active_count() <= threads, f"threads were left behind: {threading.enumerate()}"
    assert dict(os.environ) == variables, "environment variables were changed"
