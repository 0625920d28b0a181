"""A line that says how far work on files has come."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

REFRESH_SECONDS = 0.1


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """For work on files: a line that renews itself on a terminal; elsewhere nothing."""
    live, shown = sys.stderr.isatty(), 0.0

    def show(what: str, done: int, total: int) -> None:
        nonlocal shown
        if live and (time.monotonic() - shown > REFRESH_SECONDS or done == total):
            shown = time.monotonic()
            print(f"\r{what}: {done / 2**20:,.0f} of {total / 2**20:,.0f} MiB", end="", file=sys.stderr, flush=True)

    yield show
    if shown:
        print("\r" + " " * 80 + "\r", end="", file=sys.stderr, flush=True)
