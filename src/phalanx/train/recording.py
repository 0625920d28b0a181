"""What a rank notes of each step: what it did, where its seconds went, what it holds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from phalanx.events import EventLog
from phalanx.train.held import HeldMemory
from phalanx.train.utilisation import Utilisation

if TYPE_CHECKING:
    from phalanx.train.engine import Engine
    from phalanx.train.sites import SitesRound
    from phalanx.train.step import Metrics

LEAST_PAUSE = 0.5
"""Seconds between two steps from which on they are noted."""


class StepRecording:
    """Of one rank, for the events of its run."""

    def __init__(self, engine: Engine, log: EventLog, utilisation: Utilisation | None = None) -> None:
        """``utilisation``: of all ranks, where this one tells it."""
        self.engine, self.log, self.utilisation = engine, log, utilisation
        self.memory = HeldMemory(engine)
        self._checkpoint, self._last = 0.0, 0.0

    @contextmanager
    def checkpointing(self, where: str, last: bool = False) -> Iterator[None]:
        """Between two steps: what is spent here on the state is told with the next one, and noted if it is long."""
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        self._checkpoint += seconds
        if seconds >= LEAST_PAUSE:
            step = self.engine.step_number
            self.log.write("pause", on="checkpoint", step=step, seconds=seconds, last=last, where=where)

    def note(self, metrics: Metrics) -> None:
        """A step is done."""
        before, self._last = self._last, time.perf_counter()
        took = self._last - before if before else 0.0
        checkpoint, self._checkpoint = self._checkpoint, 0.0
        facts = vars(metrics).copy()
        del facts["flops"], facts["round"]
        numbers = {**facts.pop("communication"), "checkpoint_seconds": checkpoint}
        if took:  # what lies between the step before and this one, and is in no phase
            numbers["other_seconds"] = max(0.0, took - sum(metrics.seconds.values()) - checkpoint)
        if self.utilisation is not None:
            numbers |= self.utilisation.measure(metrics, took)
        facts["signals"] = metrics.signals.names()
        self.log.step(facts, numbers, self.memory.changed(), self.engine.step_number == self.engine.task.steps)
        self.note_round(metrics.round)

    def note_round(self, found: SitesRound | None) -> None:
        """All sites have agreed, where they have."""
        if found is not None:
            self.log.write("round", **vars(found) | {"signals": found.signals.names()})
