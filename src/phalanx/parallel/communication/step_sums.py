"""Nanoseconds of a rank's last steps, by phase and by group, added up as they pass: a few additions a phase.

The ring of records holds few steps where a step has many collectives; these hold the same number of steps always.
"""

from __future__ import annotations

import os
from contextlib import suppress

from phalanx.flight import (
    COMPILED,
    COMPILING,
    HAD,
    NUMBERS_A_STEP,
    QUEUED,
    SPENT,
    STEPS,
    STEPS_AT,
    WAITED,
    WAITED_ALONG,
)
from phalanx.parallel.torch_private import compile_seconds, compiled_frames

PROCESSOR = "/proc/thread-self/schedstat"
"""Where Linux says how long a thread had a processor, and how long it waited for one."""


class StepSums:
    """Of the memory of a flight record, as whole numbers of 8 bytes."""

    def __init__(self, numbers: memoryview) -> None:
        self._numbers = numbers
        self.step: int | None = None
        """The one that is added up."""
        self._at = STEPS_AT // 8
        self._before, self._compiled = (0, 0), 0
        self._file = -1
        with suppress(OSError):
            self._file = os.open(PROCESSOR, os.O_RDONLY | os.O_CLOEXEC)

    def begin(self, step: int) -> None:
        """Of the step before, what it had of a processor is known now, and what it compiled."""
        (had, queued), compiled = self._processor(), compiled_frames()
        if self.step is not None:
            self._numbers[self._at + HAD] = had - self._before[0]
            self._numbers[self._at + QUEUED] = queued - self._before[1]
            if compiled > self._compiled:
                self._numbers[self._at + COMPILED] = compiled - self._compiled
                self._numbers[self._at + COMPILING] = round(1e9 * compile_seconds(compiled - self._compiled))
            if step <= self.step:
                self._forget(step)
        self.step, self._before, self._compiled = step, (had, queued), compiled
        self._at = STEPS_AT // 8 + step % STEPS * NUMBERS_A_STEP
        self._numbers[self._at : self._at + NUMBERS_A_STEP] = _nothing
        self._numbers[self._at] = step + 1

    def _forget(self, step: int) -> None:
        """Steps from this one on were undone."""
        for at in range(STEPS_AT // 8, STEPS_AT // 8 + STEPS * NUMBERS_A_STEP, NUMBERS_A_STEP):
            if self._numbers[at] > step:
                self._numbers[at] = 0

    def spent(self, phase: int, nanoseconds: int) -> None:
        """In a phase that is over."""
        if self.step is not None:
            self._numbers[self._at + SPENT + phase] += nanoseconds

    def waited(self, phase: int, group: int, nanoseconds: int) -> None:
        """In a collective."""
        if self.step is not None:
            self._numbers[self._at + WAITED + phase] += nanoseconds
            self._numbers[self._at + WAITED_ALONG + group] += nanoseconds

    def _processor(self) -> tuple[int, int]:
        if self._file >= 0:
            with suppress(OSError, ValueError):
                had, queued, _ = os.pread(self._file, 100, 0).split()
                return int(had), int(queued)
        return self._before


_nothing = memoryview(bytes(NUMBERS_A_STEP * 8)).cast("q")
