"""Flight records as ranks would write them, by a clock that is set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from phalanx import flight
from phalanx.flight import HAD, QUEUED, Flight
from phalanx.parallel.communication.recorder import FlightRecorder
from phalanx.run import Run
from phalanx.watch.evidence import Evidence


class Scribe:
    """A rank's recorder, and the clock that it reads, in seconds."""

    def __init__(self, rank: int, world: int = 2) -> None:
        self.memory = bytearray(flight.BYTES)
        self.now = 1000.0
        self.recorder = FlightRecorder(memoryview(self.memory), rank, world, 1, lambda: round(self.now * 1e9))

    def doing(self, phase: str, seconds: float, step: int | None = None) -> None:
        """A phase, of so many seconds."""
        self.recorder.step = self.recorder.step if step is None else step
        self.recorder.doing(phase)
        self.now += seconds

    def collective(
        self,
        group: str,
        waits: float | None = 0.0,
        kind: str = "all-reduce",
        size: int = 4,
        ranks: int = 2,
        on_gpu: bool = False,
    ) -> None:
        """One that is waited for so long; None: it is never left."""
        number = self.recorder.launched(group, group.split()[0], ranks, kind, torch.ones(size), on_gpu)
        self.recorder.waiting(number)
        if waits is not None:
            self.now += waits
            self.recorder.left(number)

    def flight(self) -> Flight:
        return Flight.of(bytes(self.memory))


def flights(ranks: int, write: Callable[[int, Scribe], object]) -> dict[int, Flight]:
    """What so many ranks wrote."""
    found = {}
    for rank in range(ranks):
        scribe = Scribe(rank, ranks)
        write(rank, scribe)
        found[rank] = scribe.flight()
        found[rank].steps = found[rank].steps.copy()
        found[rank].steps[:, [HAD, QUEUED]] = 0  # this machine's, which are by another clock
        found[rank].saved = round((scribe.now + 10) * 1e9)
    return found


def evidence(
    path: Path, ranks: int, write: Callable[[int, Scribe], object], live: str = "process 1 on here"
) -> Evidence:
    noted = list(Run(path).events(0))
    return Evidence(Run(path), 1, live, done=False, stopped=False, flights=flights(ranks, write), noted=noted)
