"""Planting a bug: what one is, and how a process gets it and is rid of it again."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from phalanx.errors import WrongUse, closest
from phalanx.parallel.communication import collectives
from phalanx.parallel.communication.collectives import Pending
from phalanx.prove.replacing import Replace, replacing
from phalanx.task import Precision
from phalanx.train import step


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


TOTAL, COUNT, NORM = 0, 1, 2
"""What ranks agree on at the end of a step."""
BUGS: dict[str, Bug] = {}


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


def agreeing(replace: Replace, change: Callable[[Tensor, Tensor], None]) -> None:
    """Have ``change(own, agreed)`` spoil the one small sum in which ranks agree."""

    def all_reduce(numbers: Tensor, group: Any) -> Pending:
        own = numbers.clone()
        collectives.all_reduce(numbers, group).wait()
        if group is not None and numbers.ndim and len(numbers) == 4 + len(step.NAMES):
            change(own, numbers)
        return Pending(())

    replace(step, "collectives", SimpleNamespace(all_reduce=all_reduce, sent=collectives.sent))


def find(name: str) -> Bug:
    importlib.import_module("phalanx.prove.bugs.computing")  # which lists them
    if name not in BUGS:
        raise WrongUse(f"{name!r} is not a bug that is known; {closest(name, BUGS)}")
    return BUGS[name]


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """While this lasts, this process has the bug."""
    with replacing() as replace:
        if name is not None:
            find(name).plant(replace)
        yield
