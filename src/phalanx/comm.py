"""How what ranks send is made small: a layout's ``comm``, read from its text."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import WrongUse
from phalanx.local_updates import LocalUpdates

EXACT = "exact"
METHODS = ("bf16", "int8", "int4", "topk")
"""Those that are lossy."""
SHARDING = ("bf16", "int8", "int4")
"""Those that also scatter gradients over ``fsdp`` and gather weights."""
OWING = ("int4", "topk")
"""Those that say so little of a gradient that the rest is owed: it is kept, and added to the next."""


@dataclass(frozen=True)
class Comm:
    """A lossy method."""

    name: str
    sharding: bool = True
    """Whether it is offered over ``fsdp``."""
    owes: bool = False
    number: float = 0.0
    """Of ``topk:P``: percent that are sent."""

    @classmethod
    def parse(cls, text: str) -> Comm | None:
        """Read the text form; None where everything is sent as it is."""
        if text == EXACT or LocalUpdates.parse(text) is not None:
            return None
        name, colon, number = text.partition(":")
        if name not in METHODS or (colon and name != "topk"):
            known = (EXACT, *METHODS[:-1], "topk:1", "local:16", "diloco:16")
            raise WrongUse(f"comm={text} is not known in a layout. Choose one of: {', '.join(known)}.")
        return cls(name, name in SHARDING, name in OWING, _percent(text, number) if name == "topk" else 0.0)


def _percent(text: str, number: str) -> float:
    try:
        found = float(number)
    except ValueError:
        found = 0.0
    if not 0 < found <= 50:
        raise WrongUse(f"comm={text} does not say how many percent are sent. Give more than 0 up to 50, e.g. topk:1.")
    return found
