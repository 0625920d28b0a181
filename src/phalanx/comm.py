"""How what ranks send is made small: a layout's ``comm``, read from its text."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import WrongUse, closest

EXACT = "exact"
METHODS = ("bf16", "int8", "int4")
"""Those that are lossy."""
SHARDING = ("bf16", "int8", "int4")
"""Those that also scatter gradients over ``fsdp`` and gather weights."""
OWING = ("int4",)
"""Those that say so little of a gradient that the rest is owed: it is kept, and added to the next."""


@dataclass(frozen=True)
class Comm:
    """A lossy method."""

    name: str
    sharding: bool = True
    """Whether it is offered over ``fsdp``."""
    owes: bool = False

    @classmethod
    def parse(cls, text: str) -> Comm | None:
        """Read the text form; None where everything is sent as it is."""
        if text == EXACT:
            return None
        if text not in METHODS:
            raise WrongUse(f"comm={text} is not known in a layout; {closest(text, (EXACT, *METHODS))}")
        return cls(text, text in SHARDING, text in OWING)
