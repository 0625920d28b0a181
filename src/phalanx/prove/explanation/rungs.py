"""Which method explains a difference of which rung, and which code is responsible for that rung."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from phalanx.prove.explanation.finding import Finding
from phalanx.prove.ladder import RUNGS, Difference

Method = TypeVar("Method", bound=Callable[[Any, Finding, Difference], None])


@dataclass(frozen=True)
class Explanation:
    """How a rung is explained."""

    method: Callable[[Any, Finding, Difference], None]
    """Of an inquiry; fills in a finding's shape and cause."""
    at: Any
    """The class or function that is responsible, where it is always the same."""


EXPLANATIONS: dict[str, Explanation] = {}
"""By rung. One that is not here is told by its name, its error and its ranks."""


def explains(rung: str, at: Any = None) -> Callable[[Method], Method]:
    """Have a method explain differences of a rung."""
    assert rung in RUNGS, f"{rung!r} is not on the ladder"

    def note(method: Method) -> Method:
        EXPLANATIONS[rung] = Explanation(method, at)
        return method

    return note
