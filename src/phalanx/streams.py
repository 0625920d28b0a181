"""Where Phalanx's own lines go: on a rank whose user's output is labelled, past that. No known secret is in them."""

from __future__ import annotations

import io
import os
import sys
from typing import IO

from phalanx.redact import redact_known

_own: dict[int, IO[str]] = {}


class RedactedStream(io.TextIOWrapper):
    """A text stream that writes no secret that this process knows."""

    def write(self, text: str) -> int:
        super().write(redact_known(text))
        return len(text)


def print_whole(line: str) -> None:
    """Print a line with a secret that its reader has asked for, such as the address of a page with its token."""
    stream = stdout()
    stream.flush()
    if isinstance(stream, RedactedStream):
        stream.buffer.write(f"{line}\n".encode(errors="replace"))
    else:
        stream.write(f"{line}\n")
    stream.flush()


def stdout() -> IO[str]:
    return _own.get(1, sys.stdout)


def stderr() -> IO[str]:
    return _own.get(2, sys.stderr)


def led_elsewhere(out: int, err: int) -> None:
    """From now on what this process prints goes to these descriptors, line by line; Phalanx's own goes where it did."""
    for number, descriptor, stream in ((1, out, sys.stdout), (2, err, sys.stderr)):
        stream.flush()
        if number not in _own:
            _own[number] = RedactedStream(os.fdopen(os.dup(number), "wb"), encoding="utf-8", errors="replace")
        os.dup2(descriptor, number)
        os.close(descriptor)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)


def silenced() -> None:
    """From now on nothing that this process prints is shown, Phalanx's own neither."""
    for number in (1, 2):
        _own[number] = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
