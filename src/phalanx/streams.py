"""Where Phalanx's own lines go: on a rank whose user's output is labelled, past that."""

from __future__ import annotations

import os
import sys
from typing import IO

_own: dict[int, IO[str]] = {}


def stdout() -> IO[str]:
    return _own.get(1, sys.stdout)


def stderr() -> IO[str]:
    return _own.get(2, sys.stderr)


def led_elsewhere(out: int, err: int) -> None:
    """From now on what this process prints goes to these descriptors, line by line; Phalanx's own goes where it did."""
    for number, descriptor, stream in ((1, out, sys.stdout), (2, err, sys.stderr)):
        stream.flush()
        if number not in _own:
            _own[number] = os.fdopen(os.dup(number), "w", encoding="utf-8", errors="replace")
        os.dup2(descriptor, number)
        os.close(descriptor)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)


def silenced() -> None:
    """From now on nothing that this process prints is shown, Phalanx's own neither."""
    for number in (1, 2):
        _own[number] = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
