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
    from phalanx.train.step import Metrics

LEAST_PAUSE = 0.5
"""Seconds between two steps from which on they are noted."""
NUMBERS = ("communication", "flops", "round")
"""Of a step's metrics: what stands in its event under names of its own, or in an event of its own."""


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
        numbers = self._between(metrics, took)
        if self.utilisation is not None:
            numbers |= self.utilisation.measure(metrics, took)
        facts = vars(metrics).copy()
        for name in NUMBERS:
            del facts[name]
        facts["signals"] = metrics.signals.names()
        self.log.step(facts, numbers, self.memory.changed(), self.engine.step_number == self.engine.task.steps)
        if metrics.round is not None:
            self.log.write("round", **vars(metrics.round) | {"signals": metrics.round.signals.names()})

    def _between(self, metrics: Metrics, took: float) -> dict[str, float]:
        """Seconds of collectives, of what lies between the step before and this one, and of what is in no phase."""
        found = {**metrics.communication, "checkpoint_seconds": self._checkpoint}
        if took:
            found["other_seconds"] = max(0.0, took - sum(metrics.seconds.values()) - self._checkpoint)
        self._checkpoint = 0.0
        return found
