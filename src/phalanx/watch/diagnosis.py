"""A diagnosis: what is wrong with a run, where, and what to do; a Verdict with its facts beside its words."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from phalanx.verdict import Verdict
from phalanx.words import printable, valid_json


@dataclass
class Diagnosis(Verdict):
    """``kind``: nothing, died, stuck, desynchronised, deadlock, network, wrong or slow."""

    kind: str = "nothing"
    rank: int | None = None
    """Whose fault it is, where that is known."""
    host: str = ""
    axis: str = ""
    """Along which ranks wait, or do not say the same."""
    step: int | None = None
    """As people count them, from 1."""
    place: str = ""
    """File and line, the user's if there is one."""
    stacks: dict[int, str] = field(default_factory=dict)
    """By rank, where they were asked for."""

    def __str__(self) -> str:
        told = super().__str__()
        return "\n".join([told, *(f"\n{printable(text.rstrip())}" for text in self.stacks.values())])

    def to_json(self) -> str:
        """One JSON object; what is not known of the cause is null."""
        told = json.loads(super().to_json())
        return valid_json(told | {name: told[name] or None for name in ("host", "axis", "place")})
