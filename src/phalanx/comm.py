"""How what ranks send is made small: a layout's ``comm``, read from its text."""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.errors import WrongUse
from phalanx.local_updates import LocalUpdates

EXACT = "exact"
AUTO = "auto"
"""One of the others, chosen and chosen again by what is measured."""
METHODS = ("bf16", "int8", "int4", "onebit", "powersgd", "topk")
"""Those that are lossy."""
NUMBERS = {"topk": "1", "onebit": "20", "powersgd": "4"}
"""Of those that have one after a colon, one to give."""
SHARDING = ("bf16", "int8", "int4")
"""Those that also scatter gradients over ``fsdp`` and gather weights."""
FEWEST = "int4"
"""The one of them that sends the fewest bytes."""
OWING = ("int4", "topk", "onebit", "powersgd")
"""Those that say so little of a gradient that the rest is owed: it is kept, and added to the next."""

ONCE = ("topk", "powersgd")
"""Those whose sums are not encoded again, so that nothing is owed of them."""


@dataclass(frozen=True)
class Comm:
    """A lossy method, or ``auto``."""

    name: str
    sharding: bool = True
    """Whether it is offered over ``fsdp``."""
    owes: bool = False
    number: float = 0.0
    """Of ``topk:P``: percent that are sent; of ``onebit:P``: of the steps, that are exact; of ``powersgd:R``: rank."""

    @classmethod
    def parse(cls, text: str) -> Comm | None:
        """Read the text form; None where everything is sent as it is."""
        if text == EXACT or LocalUpdates.parse(text) is not None:
            return None
        if text == AUTO:
            return cls(AUTO, owes=True)
        name, colon, number = text.partition(":")
        if name not in METHODS or (colon and name not in NUMBERS):
            known = [EXACT, *(f"{name}:{NUMBERS[name]}" if name in NUMBERS else name for name in METHODS)]
            known += ["local:16", "diloco:16", AUTO]
            raise WrongUse(f"comm={text} is not known in a layout. Choose one of: {', '.join(known)}.")
        found = _number(text, name, number if colon or name != "onebit" else NUMBERS[name]) if name in NUMBERS else 0.0
        return cls(name, name in SHARDING, name in OWING, found)

    def exact_steps(self, steps: int) -> int:
        """Of so many, those first ones in which gradients are sent as they are."""
        percent = {"onebit": self.number, "powersgd": POWERSGD_EXACT}.get(self.name, 0.0)
        return math.ceil(steps * percent / 100)


POWERSGD_EXACT = 10.0
"""Percent of a run's steps."""
WHAT = {"topk": "the percent that are sent", "onebit": "the percent of steps that are exact"}


def _number(text: str, name: str, number: str) -> float:
    try:
        found = float(number)
    except ValueError:
        found = 0.0
    if name == "powersgd":
        if not 1 <= found <= 1024 or found != int(found):
            raise WrongUse(
                f"comm={text}: the rank of its matrices must be a whole number from 1 to 1024, as in powersgd:4."
            )
    elif not 0 < found <= 50:
        raise WrongUse(f"comm={text}: {WHAT[name]} must be above 0 and up to 50, as in {name}:{NUMBERS[name]}.")
    return found
