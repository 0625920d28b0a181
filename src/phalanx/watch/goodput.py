"""Goodput: of the time since a run first began, how much was spent on steps that count, and on what the rest went."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from phalanx.run import counted
from phalanx.step_lines import WHOLE
from phalanx.words import in_time

TRAINED = "steps that count"
AGAIN = "steps that were done again or left out"
STARTING = "start-up"
FAILED = "after failures, until ranks ran again"
AWAY = "while nobody ran it"
AHEAD = "while the clock was set forward, or the machine slept"
BETWEEN = "between steps: evaluation, saving, callbacks"
UNCOUNTED = (AWAY, AHEAD)
"""Of the time that passed by the clock: nobody ran it then."""
LEAST = 0.01
"""A part smaller than that of the whole is not told."""
CLOCK_SECONDS = 60.0
"""By so much a clock must be off the seconds that steps measured to be told."""


@dataclass
class Goodput:
    """Seconds by what they went on."""

    parts: dict[str, float] = field(default_factory=dict)
    set_back: float = 0.0
    """By how many seconds the clock went back, all times together: what passed then is known by steps alone."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def share(self) -> float:
        """Of the time that somebody ran it, what steps took that count."""
        return self.parts.get(TRAINED, 0.0) / self.ran if self.ran > 0 else 0.0

    @property
    def ran(self) -> float:
        """Seconds that somebody ran it."""
        return self.total - sum(self.parts.get(name, 0.0) for name in UNCOUNTED)

    def __str__(self) -> str:
        ran = self.ran
        rest = {name: seconds for name, seconds in self.parts.items() if name not in (TRAINED, *UNCOUNTED)}
        lost = sorted(((seconds, name) for name, seconds in rest.items() if seconds > LEAST * ran), reverse=True)
        words = [f"{seconds / ran:.0%} {name}" for seconds, name in lost]
        words += [f"{in_time(self.parts[name])} {name}, not counted" for name in UNCOUNTED if self.parts.get(name)]
        if self.set_back >= 1:
            words.append(f"the clock went back by {in_time(self.set_back)}: what passed then is known by steps alone")
        return f"goodput: {self.share:.0%} of {in_time(ran)} trained" + (f"; {'; '.join(words)}" if words else "")


def goodput(events: list[dict[str, Any]]) -> Goodput | None:
    """By rank 0's events; None: there is no step yet."""
    trained = {id(event) for event in counted(events).values() if event["kind"] == "step" and not event.get("skipped")}
    if not trained:
        return None
    found = Goodput()
    for name, seconds in _spans(events, trained):
        found.parts[name] = found.parts.get(name, 0.0) + max(0.0, seconds)
    found.set_back = sum(_set_back(before["time"], event) for before, event in pairwise(events))
    return found


def _set_back(before: float, event: dict[str, Any]) -> float:
    """By how many seconds the clock went back before an event."""
    if event["time"] >= before:
        return 0.0
    took = sum(event.get("seconds", {}).values()) + _between(event) if event["kind"] == "step" else 0.0
    return float(before - event["time"] + took)


def _spans(events: list[dict[str, Any]], trained: set[int]) -> Iterator[tuple[str, float]]:
    """One after another, without gaps; ``trained``: the ids of events whose steps count.

    Times are of a clock that somebody may set; what steps measured is not. Where it went back, that alone is counted.
    """
    until, gap = events[0]["time"], STARTING
    for event in events:
        kind, now = event["kind"], event["time"]
        if kind == "step":
            took, between = sum(event.get("seconds", {}).values()), _between(event)
            if now < until:
                yield gap, between if gap == BETWEEN else 0.0
            else:
                took = min(took, now - until)
                ahead = now - until - took - between
                if gap != BETWEEN or not _is_measured(event) or ahead < CLOCK_SECONDS:
                    ahead = 0.0
                yield gap, now - until - took - ahead
                if ahead:
                    yield AHEAD, ahead
            yield TRAINED if id(event) in trained else AGAIN, took
            until, gap = now, BETWEEN
        elif kind in ("failure", "stopped", "end"):
            yield gap, now - until
            until, gap = now, FAILED if kind == "failure" else AWAY
        elif kind == "start":
            lost = gap if gap in (FAILED, AWAY, STARTING) else FAILED  # a rank was killed without a word
            yield lost, now - until
            until, gap = now, STARTING
    yield gap, events[-1]["time"] - until


def _between(event: dict[str, Any]) -> float:
    """Seconds between the step before and this one, as it measured them."""
    return float(sum(event.get(name, 0.0) for name in ("other_seconds", "checkpoint_seconds")))


def _is_measured(event: dict[str, Any]) -> bool:
    """Whether it says so itself: later steps are written short, and tell means of several."""
    return "other_seconds" in event and event["step"] < WHOLE
