"""What collectives cost a step, by axis: how long a rank stood waiting for them, how long they were on their way.

A collective is taken to run beside a rank's work from its launch until it is waited for, which is the most that it can
have. Of several along one axis at once the time counts once. On a GPU the device's own clock is read a step later.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

from phalanx.parallel.communication.instants import Instant, elapsed, has_come
from phalanx.parallel.communication.recorder import FlightRecorder

Collective = tuple[str, Instant, Instant, Instant]
"""Its axis; when it was launched, waited for, and over."""


class Exposure:
    """Of one rank's steps, from `start` to `taken`."""

    def __init__(self, recorder: FlightRecorder) -> None:
        """``recorder``: adds up what a processor waits."""
        self._recorder, self._counting = recorder, False
        self._before: list[tuple[int, int]] = []
        self._untold: deque[Collective] = deque()
        """Of a GPU."""
        self._covered: dict[str, Instant] = {}
        """By axis: up to when its time has been counted."""

    def start(self) -> None:
        """A step begins."""
        self._counting, self._before = True, self._recorder.along()

    def waited(self, axis: str, since: Instant, waits: Instant, ended: Instant) -> None:
        """A GPU is past a collective, or will be; what is done behind the steps is not counted."""
        if self._counting:
            self._untold.append((axis, since, waits, ended))

    @contextmanager
    def recording(self) -> Iterator[list[Collective]]:
        """What is waited for in here is noted alone: it happens when a graph is replayed."""
        before, self._untold = self._untold, deque()
        noted: list[Collective] = []
        try:
            yield noted
        finally:
            noted += self._untold
            self._untold = before

    def replayed(self, recorded: Sequence[Collective]) -> None:
        """A graph was, in which these are."""
        self._untold.extend(recorded)
        self._covered.clear()

    def taken(self) -> dict[str, float]:
        """The step is over: seconds ``exposed_AXIS`` and ``overlapped_AXIS`` of all that is known by now."""
        found: dict[str, float] = {}
        before, axes = self._before, self._recorder.axes
        for row, (exposed, overlapped) in enumerate(self._recorder.along() if self._counting else ()):
            had = before[row] if row < len(before) else (0, 0)
            if exposed > had[0] or overlapped > had[1]:
                _add(found, axes[row], (exposed - had[0]) / 1e9, (overlapped - had[1]) / 1e9)
        while self._untold and has_come(self._untold[0][3]):
            axis, since, waits, ended = self._untold.popleft()
            covered = self._covered.get(axis)
            begun = since if covered is None or elapsed(covered, since) > 0 else covered
            _add(found, axis, elapsed(waits, ended), max(0.0, elapsed(begun, waits)))
            self._covered[axis] = ended
        self._counting = False
        return found


@cache
def _names(axis: str) -> tuple[str, str]:
    """What events call them."""
    word = re.sub(r"\W+", "_", axis)
    return f"exposed_{word}", f"overlapped_{word}"


def _add(found: dict[str, float], axis: str, exposed: float, overlapped: float) -> None:
    for name, seconds in zip(_names(axis), (exposed, overlapped), strict=True):
        found[name] = found.get(name, 0.0) + seconds
