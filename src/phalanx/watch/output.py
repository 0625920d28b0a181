"""Output that never ends the program: neither a pipe whose reader has left, nor a full disk, nor a closed terminal."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import Any

from phalanx.streams import RedactedStream

LEFT = (errno.EPIPE, errno.EIO)
"""Nobody reads it any more, as whoever left knows."""


class Lasting(io.FileIO):
    """A file descriptor to write to. What it does not take is dropped, and the reason kept in ``lost``."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "wb", closefd=False)
        self.lost: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            while (written := super().write(data)) is None:
                select.select([], [self], [])  # somebody made it non-blocking
            return written
        except OSError as error:
            self.lost = error
            return len(data)


class OutputStream(RedactedStream):
    """Text over a `Lasting` descriptor; characters that it cannot show become others."""

    def __init__(self, number: int, before: Any) -> None:
        if before is None:  # closed by the caller
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        self.raw_file = Lasting(number)
        super().__init__(
            io.BufferedWriter(self.raw_file), getattr(before, "encoding", None) or "utf-8", "replace",
            line_buffering=number == 2 or self.raw_file.isatty(),
        )  # fmt: skip
        self.before = before  # or its end would close the descriptor

    def lost(self) -> str:
        """Why something did not get through that somebody may be waiting for; empty if all is well."""
        self.flush()
        error = self.raw_file.lost
        return "" if error is None or error.errno in LEFT else str(error.strerror)


def install() -> OutputStream:
    """Have this process, and those forked from it, print through such streams; returns that of standard output."""
    sys.stdout, sys.stderr = out, _ = OutputStream(1, sys.stdout), OutputStream(2, sys.stderr)
    return out
