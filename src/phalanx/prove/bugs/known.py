"""Every known bug, by name, and how a process gets one and is rid of it again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.errors import WrongUse, closest
from phalanx.prove.bugs import (
    attention,
    data,
    decisions,
    experts,
    forward,
    gradients,
    optimizer,
    resume,
    stopping,
)
from phalanx.prove.bugs.planting import BUGS, Bug
from phalanx.prove.bugs.seams import replaced

FILES = (attention, data, decisions, experts, forward, gradients, optimizer, resume, stopping)
"""Each lists its own when it is imported."""

__all__ = ["BUGS", "FILES", "find", "planted"]


def find(name: str) -> Bug:
    if name not in BUGS:
        raise WrongUse(f"{name!r} is not a bug that is known; {closest(name, BUGS)}")
    return BUGS[name]


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """While this lasts, this process has the bug."""
    with replaced() as replace:
        if name is not None:
            find(name).plant(replace)
        yield
