"""What a host keeps of the last moments of its ranks: flight records, stacks, and an account of what failed.

The memory is the supervisor's, so that it outlives any rank and is read of a frozen one. It goes into the run's folder
by a thread of the supervisor's: a folder that does not answer must hold up neither ranks nor whoever watches them.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from types import TracebackType
from typing import Self

from phalanx import flight
from phalanx.events import plain
from phalanx.files import write_whole
from phalanx.folder_files import BadFile, make_folder
from phalanx.launch import stacks
from phalanx.launch.host_figures import HostLog
from phalanx.launch.local import Failure
from phalanx.launch.stopping import handled
from phalanx.redact import redact
from phalanx.run import Run

SAVE_SECONDS = 5.0
"""Between two times that records are put into the folder; more where there are more than a few hundred ranks."""
KEPT = 4
"""So many generations' records stay there."""
LAST_SECONDS = 5.0
"""How long a folder that does not answer is waited for at the end of a generation."""


class BlackBox:
    """Of one host, for one generation after another."""

    def __init__(self, run: Run, ranks: int, new_memory: Callable[[], int]) -> None:
        self.run, self.ranks = run, ranks
        self._memory = mmap.mmap(-1, ranks * flight.BYTES)  # shared with every process forked after this
        self.stacks = [new_memory() for _ in range(ranks)]
        """By rank of this host, memory that its stacks are written to."""
        self.generation, self.first, self.pause = 0, 0, SAVE_SECONDS
        self._asked = False
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._handling = handled([stacks.SIGNAL], lambda number, frame: setattr(self, "_asked", True))

    def __enter__(self) -> Self:
        self._handling.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._handling.__exit__(kind, error, trace)
        for memory in self.stacks:
            os.close(memory)

    def row(self, rank: int) -> memoryview:
        """The memory for a flight record, by rank of this host."""
        return memoryview(self._memory)[rank * flight.BYTES : (rank + 1) * flight.BYTES]

    def begin(self, generation: int, first: int, world: int) -> None:
        """A new generation, whose first rank here has this number; before it is forked."""
        self._end()
        for rank in range(self.ranks):
            self.row(rank)[:] = bytes(flight.BYTES)
            os.ftruncate(self.stacks[rank], 0)
            os.lseek(self.stacks[rank], 0, os.SEEK_SET)  # where all forks write on
        self.generation, self.first = generation, first
        self.pause = max(SAVE_SECONDS, world / 100)
        if first == 0:
            self._forget()

    def look(self, pids: dict[int, int]) -> None:
        """Called often, with the processes that run by rank."""
        if self._thread is None:  # not before: no thread is forked
            self._over = threading.Event()
            self._thread = _begun(self._saving, self._over, self.generation, self.first)
        if self._asked:
            self._asked = False
            self.collect(pids)

    def collect(self, pids: dict[int, int]) -> None:
        """Stacks and records of these, now."""
        told = stacks.asked(pids, dict(enumerate(self.stacks, self.first)))
        generation, first = self.generation, self.first

        def write() -> None:
            stacks.write(self.run, generation, told)
            self._save(generation, first)

        _begun(write).join(LAST_SECONDS)

    def over(self, failures: Sequence[Failure], steps: int, asked: bool = False) -> None:
        """The generation has ended; in what way, the first failure first. ``asked``: somebody wanted it to."""
        if self._thread is None:
            _begun(self._save, self.generation, self.first).join(LAST_SECONDS)
        self._end()
        if failures:
            _begun(self._account, failures, steps).join(LAST_SECONDS)
        if asked:
            _begun(flight.note_stop, self.run, self.generation).join(LAST_SECONDS)

    def filed(self, failure: Failure, generation: int) -> Failure:
        """With its whole traceback in the run's folder."""
        if not failure.whole or failure.final:
            return failure
        path = self.run.path / "failures" / f"generation-{generation:05d}-rank-{failure.rank:05d}.txt"
        try:
            make_folder(self.run.path, path.parent)
            write_whole(path, redact(failure.whole), within=self.run.path)
        except (OSError, BadFile):  # a full disk: what is on the screen must do
            return failure
        return replace(failure, file=str(path))

    def _account(self, failures: Sequence[Failure], steps: int) -> None:
        for failure in failures:
            if failure.by_signal:
                stacks.keep(self.run, self.generation, failure.rank, self.stacks[failure.rank - self.first])
        account = {
            "host": socket.gethostname(), "generation": self.generation, "first": self.first, "ranks": self.ranks,
            "steps": steps, "time": time.time(),
            "failures": [{name: value for name, value in asdict(f).items() if name not in SAID} for f in failures],
        }  # fmt: skip
        path = self.run.path / "failures" / f"generation-{self.generation:05d}-from-{self.first:05d}.json"
        with suppress(OSError, BadFile):  # a full disk: what is on the screen must do
            make_folder(self.run.path, path.parent)
            write_whole(path, json.dumps(plain(account)), within=self.run.path)

    def _saving(self, over: threading.Event, generation: int, first: int) -> None:
        host = HostLog(self.run, first, self.ranks)
        while not over.wait(self.pause):
            self._save(generation, first)
            host.write()
        host.close()
        self._save(generation, first)

    def _save(self, generation: int, first: int) -> None:
        with suppress(OSError, BadFile):  # a full disk: the run does not need it
            for rank in range(self.ranks):
                begun = self._memory[rank * flight.BYTES]
                if begun and generation == self.generation:  # or a folder that hung has answered at last
                    flight.save(self.run, generation, first + rank, self.row(rank).tobytes())

    def _end(self) -> None:
        """The thread saves once more."""
        if self._thread is not None:
            self._over.set()
            self._thread.join(LAST_SECONDS)
            self._thread = None

    def _forget(self) -> None:
        """What earlier generations left, but for the last ones."""
        for generation in [each for each in flight.generations(self.run) if each <= self.generation - KEPT]:
            shutil.rmtree(flight.folder(self.run, generation), ignore_errors=True)
            shutil.rmtree(stacks.folder(self.run, generation), ignore_errors=True)


def _begun(work: Callable[..., object], *given: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=given, name="black box", daemon=True)
    thread.start()
    return thread


SAID = ("when", "whole", "code", "worker_killed", "may_pass")
"""What an account does not need of a failure: a traceback has a file of its own."""
