"""Processes of the suite's fork server, in which a test may train."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from phalanx.launch import forkserver
from phalanx.launch.forkserver import Forked, ForkServer


def server() -> ForkServer:
    """The one that is there since all tests were imported."""
    found = forkserver.kept()
    assert found is not None
    return found


def printing_into(path: str) -> None:
    """From now on what this process prints is in a file."""
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")


def fork(function: Callable[..., Any], *args: Any, descriptors: tuple[int, ...] = ()) -> Forked:
    """Run ``function(*args, *descriptors)`` in a process of its own."""
    return server().fork(function, *args, descriptors=descriptors)
