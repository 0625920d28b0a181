"""Nanoseconds of a rank's last steps, by phase and by group, added up as they pass: a few additions a phase.

The ring of records holds few steps where a step has many collectives; these hold the same number of steps always. A
step's sums are put into the flight record when the next one begins. The C of `notes` does the same.
"""

from __future__ import annotations

import os
import weakref
from array import array
from contextlib import suppress
from operator import sub

from phalanx.flight import (
    COMPILED,
    COMPILING,
    DEVICE_WAITED,
    FIRST,
    GROUPS,
    HAD,
    MOST_PHASES,
    NOW_AT,
    NUMBERS_A_STEP,
    ON_DEVICE,
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

    def __init__(self, numbers: memoryview, processor: str = PROCESSOR) -> None:
        self._numbers = numbers
        self.step: int | None = None
        """The one that is added up."""
        self.spent, self.waited = _none(MOST_PHASES), _none(MOST_PHASES)
        """By phase: all, and of that in collectives."""
        self.along, self.beside = _none(GROUPS), _none(GROUPS)
        """By group, since ever: waited for its collectives; and from their launch until then."""
        self._along = _none(GROUPS)
        self._at = STEPS_AT // 8
        self._before, self._compiled = (0, 0), 0
        self.processor = -1
        """An open file that says what this thread has had of a processor, if there is one."""
        with suppress(OSError):
            self.processor = os.open(processor, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self.processor)

    def begin(self, step: int) -> None:
        """Of the step before, what it had of a processor is known now, and what it compiled."""
        (had, queued), compiled = self._processor(), compiled_frames()
        numbers, at = self._numbers, self._at
        if self.step is None:
            numbers[NOW_AT // 8 + FIRST] = step
        else:
            numbers[at + HAD] = had - self._before[0]
            numbers[at + QUEUED] = queued - self._before[1]
            if compiled > self._compiled:
                numbers[at + COMPILED] = compiled - self._compiled
                numbers[at + COMPILING] = round(1e9 * compile_seconds(compiled - self._compiled))
            self._put(at)
            if step <= self.step:
                self._forget(step)
        self.step, self._before, self._compiled = step, (had, queued), compiled
        self.spent[:] = self.waited[:] = _no_phases
        self._along[:] = self.along
        self._at = at = STEPS_AT // 8 + step % STEPS * NUMBERS_A_STEP
        numbers[at : at + NUMBERS_A_STEP] = _nothing
        numbers[at] = step + 1

    def on_device(self, spent: int, waited: int) -> None:
        """What the clock of a GPU says of steps, as far as it has come by now."""
        self._numbers[self._at + ON_DEVICE], self._numbers[self._at + DEVICE_WAITED] = spent, waited

    def _put(self, at: int) -> None:
        self._numbers[at + SPENT : at + WAITED] = self.spent
        self._numbers[at + WAITED : at + WAITED_ALONG] = self.waited
        along = array("q", map(sub, self.along, self._along))
        self._numbers[at + WAITED_ALONG : at + NUMBERS_A_STEP] = along

    def _forget(self, step: int) -> None:
        """Steps from this one on were undone."""
        for at in range(STEPS_AT // 8, STEPS_AT // 8 + STEPS * NUMBERS_A_STEP, NUMBERS_A_STEP):
            if self._numbers[at] > step:
                self._numbers[at] = 0

    def _processor(self) -> tuple[int, int]:
        if self.processor >= 0:
            with suppress(OSError, ValueError):
                had, queued, _ = os.pread(self.processor, 100, 0).split()
                return int(had), int(queued)
        return self._before


def _none(count: int) -> array[int]:
    return array("q", bytes(8 * count))


_nothing, _no_phases = _none(NUMBERS_A_STEP), _none(MOST_PHASES)
