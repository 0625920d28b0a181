"""What a planted bug is: a function that replaces right code at seams, and what a proof should say of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from phalanx.prove.bugs.seams import Replace
from phalanx.task import Precision


@dataclass(frozen=True)
class Bug:
    """A mistake that people make, how to make it here, and what a proof should say of it."""

    name: str
    row: int
    """Its number in the list of bugs that were reported; 0 for one that is not in it."""
    plant: Callable[[Replace], None]
    """Called on each rank before its engine is made."""
    layout: str
    """One that shows it."""
    place: str
    """What a finding should name: a tensor, a module, or the phase of a step; alternatives with ``|``."""
    axis: str
    """The axis that it takes; empty if it shows on one device too."""
    factor: float | None = None
    task: str = "gpt"
    settings: dict[str, Any] = field(default_factory=dict)
    """What the task must have for it."""
    dtype: Precision | None = None
    """The precision that shows it, if float64 does not."""

    @property
    def words(self) -> str:
        """What it does, in a line."""
        return " ".join((self.plant.__doc__ or "").split())


BUGS: dict[str, Bug] = {}
"""Those of the files that were imported; `known` imports all."""


def bug(
    row: int,
    layout: str,
    place: str,
    axis: str,
    factor: float | None = None,
    task: str = "gpt",
    dtype: Precision | None = None,
    **settings: Any,
) -> Callable[[Callable[[Replace], None]], Callable[[Replace], None]]:
    """List a function among the bugs, under its own name."""

    def note(plant: Callable[[Replace], None]) -> Callable[[Replace], None]:
        BUGS[plant.__name__] = Bug(plant.__name__, row, plant, layout, place, axis, factor, task, settings, dtype)
        return plant

    return note


def rank() -> int:
    """Of this process, for bugs that only one rank has."""
    return dist.get_rank() if dist.is_initialized() else 0
