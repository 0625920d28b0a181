"""Seconds by phase of a step; on a GPU the device's own time, not that of launching its work, and never waited for.

Who looks from outside is told which phase a rank is in.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch

Instant = float | torch.cuda.Event


class Clock:
    """``start`` a step's first phase, ``begin`` each that follows, ``stop``; ``seconds`` adds up those of one name."""

    def __init__(self, device: torch.device, doing: Callable[[str], object] = lambda phase: None) -> None:
        """``doing`` is told of each phase that begins."""
        self._cuda, self._doing = device.type == "cuda", doing
        self._last: Instant = 0.0
        self._phase = ""
        """Nothing: no step is measured."""
        self._laps: list[tuple[str, Instant, Instant]] = []
        """Of the step that runs, or of one that failed."""
        self._untold: deque[tuple[str, Instant, Instant]] = deque()

    def _now(self) -> Instant:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self, phase: str) -> None:
        """What was measured of a step that failed is forgotten."""
        self._last, self._laps, self._phase = self._now(), [], phase
        self._doing(phase)

    def begin(self, phase: str) -> None:
        """The phase before it is over; nothing, where no step is measured."""
        if self._phase and phase != self._phase:
            self._lap(phase)
            self._doing(phase)

    def stop(self) -> None:
        self._lap("")

    def _lap(self, following: str) -> None:
        begun, self._last = self._last, self._now()
        self._laps.append((self._phase, begun, self._last))
        self._phase = following

    def seconds(self) -> dict[str, float]:
        """Of all laps that are over and were not told yet: a GPU's last ones come with the next step's."""
        found: dict[str, float] = {}
        self._untold.extend(self._laps)
        self._laps = []
        while self._untold and _is_over(self._untold[0][2]):
            phase, begun, ended = self._untold.popleft()
            found[phase] = found.get(phase, 0.0) + _elapsed(begun, ended)
        return found


def _is_over(instant: Instant) -> bool:
    return not isinstance(instant, torch.cuda.Event) or instant.query()


def _elapsed(before: Instant, after: Instant) -> float:
    if isinstance(before, torch.cuda.Event):
        assert isinstance(after, torch.cuda.Event)
        return before.elapsed_time(after) / 1000
    assert isinstance(after, float)
    return after - before
