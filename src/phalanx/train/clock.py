"""Seconds by phase of a step; on a GPU the device's own time, not that of launching its work, and never waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from phalanx.parallel.communication.instants import Instant, elapsed, has_come, now


class Clock:
    """``start``, then ``begin`` where a phase does, which ends the one before; ``seconds`` adds up those of a name."""

    def __init__(self, device: torch.device, *watchers: Callable[[str], None]) -> None:
        self._cuda = device.type == "cuda"
        self._phase = ""
        """The phase that runs; "": no step does."""
        self._last: Instant = 0.0
        self._laps: list[tuple[str, Instant, Instant]] = []
        """Of the step that runs, or of one that failed."""
        self._untold: deque[tuple[str, Instant, Instant]] = deque()
        self._noted: list[tuple[str, Instant]] | None = None
        """While a graph is recorded: phases that begin whenever it is replayed."""
        self.watchers = list(watchers)
        """Told of every phase when it begins, and with nothing when the last of a step is over."""
        self._always = len(self.watchers)

    @property
    def is_watched(self) -> bool:
        """Whether by more than were there from the beginning."""
        return len(self.watchers) > self._always

    def start(self, phase: str) -> None:
        """A step begins, and its first phase."""
        self._phase, self._last, self._laps = phase, now(self._cuda), []
        self._tell(phase)

    def begin(self, phase: str) -> None:
        """If it runs already, it goes on; between two steps, where evaluations take the same way, there is none."""
        if not self._phase or phase == self._phase:
            return
        self._end_lap(phase, now(self._cuda))
        if self._noted is not None:
            self._noted.append((phase, self._last))
        self._tell(phase)

    def _end_lap(self, phase: str, moment: Instant) -> None:
        self._laps.append((self._phase, self._last, moment))
        self._phase, self._last = phase, moment

    @contextmanager
    def recording(self) -> Iterator[list[tuple[str, Instant]]]:
        """Phases that begin in here are noted alone: they begin when a graph is replayed."""
        phase, last, laps = self._phase, self._last, list(self._laps)
        noted: list[tuple[str, Instant]] = []
        self._noted = noted
        try:
            yield noted
        finally:
            self._noted, self._phase, self._last, self._laps = None, phase, last, laps

    def replayed(self, noted: Sequence[tuple[str, Instant]]) -> None:
        """A graph was, in which these begin."""
        for phase, moment in noted:
            self._end_lap(phase, moment)

    @contextmanager
    def beside(self, phase: str) -> Iterator[None]:
        """A phase between two steps, which somebody else takes the time of."""
        self._tell(phase)
        try:
            yield
        finally:
            self._tell("")

    def _tell(self, phase: str) -> None:
        for watcher in tuple(self.watchers):  # one may leave, or bring others
            watcher(phase)

    def seconds(self) -> dict[str, float]:
        """The step is over. Of all laps that are and were not told yet: a GPU's last ones come with the next step's."""
        self.begin("")
        found: dict[str, float] = {}
        self._untold.extend(self._laps)
        self._laps = []
        while self._untold and has_come(self._untold[0][2]):
            phase, begun, ended = self._untold.popleft()
            found[phase] = found.get(phase, 0.0) + elapsed(begun, ended)
        return found
