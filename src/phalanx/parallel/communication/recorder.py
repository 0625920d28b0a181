"""A rank's side of the flight record: each collective and each phase noted, in about a microsecond, in lent memory."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from phalanx.flight import HEADER, MAGIC
from phalanx.parallel.communication.compiled_notes import fastest
from phalanx.parallel.communication.places import Places
from phalanx.parallel.communication.step_sums import StepSums


class FlightRecorder:
    """Writes this rank's flight record into memory that its supervisor lends."""

    def __init__(
        self, memory: memoryview, rank: int, world: int, generation: int, clock: Callable[[], int] | None = None
    ) -> None:
        """``clock``: nanoseconds since 1970; the host's if there is none."""
        self.memory = memory
        places, self._sums = Places(memory), StepSums(memory.cast("q"))
        self.axes = places.axes
        """By row of a group."""
        self.notes = notes = fastest().Notes(memory, places, self._sums, clock)
        self.doing, self.launched, self.arrived = notes.doing, notes.launched, notes.arrived
        self.waiting, self.left = notes.waiting, notes.left
        HEADER.pack_into(
            memory, 0, MAGIC, rank, world, generation, os.getpid(), os.getppid(),
            socket.gethostname().encode()[:64], threading.main_thread().ident or 0,
        )  # fmt: skip
        self.doing("start-up")

    @property
    def step(self) -> int:
        """The one that runs."""
        return self.notes.step

    @step.setter
    def step(self, step: int) -> None:
        self.notes.step = step

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before = self.doing(phase)
        try:
            yield
        finally:
            self.doing(before)

    def along(self) -> list[tuple[int, int]]:
        """By row of a group, since ever: nanoseconds waited, and those from launches until then."""
        rows = len(self.axes)
        return list(zip(self._sums.along[:rows], self._sums.beside[:rows], strict=True))

    def on_device(self, spent: float, waited: float) -> None:
        """Seconds of a step by the clock of this rank's GPU; of these, in collectives."""
        self.notes.on_device(round(1e9 * spent), round(1e9 * waited))
