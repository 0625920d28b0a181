"""Signals: what one rank has to tell all ranks with a step's one small all-reduce.

A rank sets its own between two steps; after the step every rank reads the same ones, those that any rank had set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

from phalanx.launch.stopping import Requests


@dataclass
class Signals(Requests):
    """Each is set by one place and read by one: no rank acts on its own before all have agreed."""

    finish: bool = False
    """A callback has ended the run."""
    saved: bool = False
    """The last save is whole on disk, of which only rank 0 can know."""
    busy: bool = False
    """A save, or a copy for another host, is still under way."""
    resting: bool = False
    """A step has waited for a copy in memory: the next one comes later."""
    failed: bool = False
    """The last save did not succeed."""
    new_names: bool = False
    """It has logged under names that not all ranks know yet."""

    def packed(self) -> list[float]:
        """One number each, to be summed over all ranks."""
        return [float(getattr(self, name)) for name in NAMES]

    @classmethod
    def unpacked(cls, sums: Sequence[float]) -> Self:
        """What any rank had set."""
        return cls(**{name: bool(value) for name, value in zip(NAMES, sums, strict=True)})

    def names(self) -> list[str]:
        """Of those that are set; mostly none is."""
        return [name for name in NAMES if getattr(self, name)] if True in vars(self).values() else []


NAMES = tuple(field.name for field in fields(Signals))
