"""Goodput: of the time since a run first began, how much was spent on steps that count, and on what the rest went."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from phalanx.run import counted
from phalanx.words import in_time

TRAINED = "steps that count"
AGAIN = "steps that were done again or left out"
STARTING = "start-up"
FAILED = "after failures, until ranks ran again"
AWAY = "while nobody ran it"
BETWEEN = "between steps: evaluation, saving, callbacks"
LEAST = 0.01
"""A part smaller than that of the whole is not told."""


@dataclass
class Goodput:
    """Seconds by what they went on."""

    parts: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def share(self) -> float:
        """Of the time that somebody ran it, what steps took that count."""
        ran = self.total - self.parts.get(AWAY, 0.0)
        return self.parts.get(TRAINED, 0.0) / ran if ran > 0 else 0.0

    def __str__(self) -> str:
        ran = self.total - self.parts.get(AWAY, 0.0)
        rest = {name: seconds for name, seconds in self.parts.items() if name not in (TRAINED, AWAY)}
        lost = sorted(((seconds, name) for name, seconds in rest.items() if seconds > LEAST * ran), reverse=True)
        words = [f"{seconds / ran:.0%} {name}" for seconds, name in lost]
        if away := self.parts.get(AWAY, 0.0):
            words.append(f"{in_time(away)} {AWAY}, not counted")
        return f"goodput: {self.share:.0%} of {in_time(ran)} trained" + (f"; {'; '.join(words)}" if words else "")


def goodput(events: list[dict[str, Any]]) -> Goodput | None:
    """By rank 0's events; None: there is no step yet."""
    trained = {id(event) for event in counted(events).values() if event["kind"] == "step" and not event.get("skipped")}
    if not trained:
        return None
    found = Goodput()
    for name, seconds in _spans(events, trained):
        found.parts[name] = found.parts.get(name, 0.0) + max(0.0, seconds)
    return found


def _spans(events: list[dict[str, Any]], trained: set[int]) -> Iterator[tuple[str, float]]:
    """One after another, without gaps; ``trained``: the ids of events whose steps count."""
    until, gap = events[0]["time"], STARTING
    for event in events:
        kind, now = event["kind"], event["time"]
        if kind == "step":
            took = min(sum(event.get("seconds", {}).values()), now - until)
            yield gap, now - until - took
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
