"""Seconds by phase of a step; on a GPU the device's own time, not that of launching its work."""

from __future__ import annotations

import time

import torch


class Clock:
    """``start``, then a ``lap`` at the end of each phase; ``seconds`` adds up laps of the same name."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._laps: list[tuple[str, float | torch.cuda.Event]] = []

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        self._laps = [("", self._now())]

    def lap(self, phase: str) -> None:
        self._laps.append((phase, self._now()))

    def seconds(self) -> dict[str, float]:
        """Waits for the device, then tells."""
        if self._cuda:
            torch.cuda.synchronize()
        found: dict[str, float] = {}
        for (_, before), (phase, after) in zip(self._laps, self._laps[1:], strict=False):
            found[phase] = found.get(phase, 0.0) + _elapsed(before, after)
        return found


def _elapsed(before: float | torch.cuda.Event, after: float | torch.cuda.Event) -> float:
    if isinstance(before, torch.cuda.Event):
        assert isinstance(after, torch.cuda.Event)
        return before.elapsed_time(after) / 1000
    assert isinstance(after, float)
    return after - before
