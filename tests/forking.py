"""Processes of the suite's fork server, in which a test may train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx.launch import forkserver
from phalanx.launch.forkserver import Forked, ForkServer


def server() -> ForkServer:
    """The one that is there since all tests were imported."""
    found = forkserver.kept()
    assert found is not None
    return found


def fork(function: Callable[..., Any], *args: Any, descriptors: tuple[int, ...] = ()) -> Forked:
    """Run ``function(*args, *descriptors)`` in a process of its own."""
    return server().fork(function, *args, descriptors=descriptors)
