"""Steps in few bytes: the first of a run are written whole, later ones in short lines, with a whole one now and then.

A short line of a rank that writes what all share has the step, its loss, its norm and the hash of its samples; that of
another rank has its seconds by phase. A whole line after that has means of what short ones leave out, ``of`` so many
steps. Who reads a run's events gets whole ones: what a short line lacks is as the last whole one has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

WHOLE = 1000
"""So many steps of a run are written whole."""
EVERY = 50
"""And so many later ones have one whole line."""
SUMMED = ("seconds", "sent", "losses", "logged")
"""Facts of a step that are numbers by name."""
RATES = ("tflops", "mfu")
"""Numbers of which five digits say enough."""
USUAL: dict[str, Any] = {"skipped": False, "bad": "", "signals": [], "turn": ""}
"""A step with anything else here, but for its turn, has a whole line."""
ONLY_WHOLE = "sent"
"""What no short line has."""


class StepLines:
    """One rank's steps as they are written."""

    def __init__(self, shared: bool) -> None:
        """``shared``: it writes what all ranks share."""
        self._shared, self._begun, self._since = shared, False, 0
        self._sums: dict[str, dict[str, float]] = {}
        self._held: dict[str, int] = {}

    def of(
        self,
        when: float,
        facts: Mapping[str, Any],
        numbers: Mapping[str, float],
        held: Mapping[str, int],
        last: bool = False,
    ) -> dict[str, Any]:
        """What is written of a step at that time: facts, numbers of its own, and those that change seldom.

        ``last``: no more are to come.
        """
        facts = {**facts, "seconds": {phase: round(value, 6) for phase, value in facts["seconds"].items()}}
        numbers = {name: round(_digits(value) if name in RATES else value, 6) for name, value in numbers.items()}
        if facts["step"] < WHOLE:
            self._begun = True
            return {**facts, **numbers, **held}
        self._add(facts, numbers)
        self._held |= held
        unusual = any(facts[name] for name in USUAL if name != "turn")
        if last or unusual or not self._begun or self._since >= EVERY:
            return self._whole(facts)
        found = {"time": round(when, 3), "step": facts["step"]}
        if not self._shared:
            return found | {"seconds": {phase: float(f"{value:.4g}") for phase, value in facts["seconds"].items()}}
        found |= {"loss": facts["loss"], "grad_norm": float(f"{facts['grad_norm']:.6g}"), "samples": facts["samples"]}
        return found | ({"turn": facts["turn"]} if facts["turn"] else {})

    def _add(self, facts: Mapping[str, Any], numbers: Mapping[str, float]) -> None:
        self._since += 1
        for name, values in ("", numbers), *((name, facts[name]) for name in SUMMED):
            sums = self._sums.setdefault(name, {})
            for key, value in values.items():
                sums[key] = sums.get(key, 0.0) + value

    def _whole(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        steps, held = self._since, self._held
        means = {
            name: {key: float(f"{value / steps:.6g}") for key, value in of.items()} for name, of in self._sums.items()
        }
        self._begun, self._since, self._sums, self._held = True, 0, {}, {}
        numbers = means.pop("")
        if not self._shared:
            means.pop("seconds")  # short lines have them
        return {**facts, **means, **numbers, **held, "of": steps}


def _digits(value: float) -> float:
    return float(f"{value:.5g}")


def filled(events: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A rank's events in order, with whole steps in the place of short ones."""
    known: dict[str, Any] = {}
    for event in events:
        if event["kind"] != "step" or (ONLY_WHOLE not in event and not known):
            yield event
        elif ONLY_WHOLE in event:
            known = event | {name: usual for name, usual in USUAL.items() if name in event}
            known.pop("of", None)
            yield event
        else:
            yield known | event
