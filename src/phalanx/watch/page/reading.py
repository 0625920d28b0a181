"""Files of events read on from where they were, by several processes where there is much."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.pool import Pool
from typing import Any

from phalanx.flight import MOST_RANKS
from phalanx.folder_files import BadFile, is_file, left_out, names, reading
from phalanx.run import Run
from phalanx.watch.page.lines import Columns, read
from phalanx.words import in_bytes

MUCH = 16 << 20
"""Bytes from which on several processes are worth starting."""
MOST_PROCESSES = 8
MOST_AT_ONCE = 1 << 27
"""Bytes that are read of a file at once."""
HOLES = 64
"""A file that says to be so many times larger than what the disk holds of it is mostly holes."""
OWN = ("time", "step", "seconds", "sent", "of")
"""What a step's event has of its rank alone, beside what begins or ends so; all else is the same for all of them."""
MEMORY, EXPOSED = "memory_", "exposed_"
"""Bytes by what they are for; seconds that a rank did nothing but wait for others, by axis."""
BESIDE = ("overlapped_", "_seconds")
"""Of its collectives, and between its steps."""


@dataclass
class EventFile:
    """One rank's file of events, as far as it was read."""

    rank: int
    offset: int = 0
    inode: int = 0
    unread: bool = False
    """There is more of it than was read at once."""

    def more(self, run: Run) -> tuple[bytes, bool]:
        """Whole lines that were written since, or the first of them; and whether it is another file than before."""
        path, another, data, self.unread = run.events_path(self.rank), False, b"", False
        with left_out(), reading(run.path, path) as file:
            found = os.fstat(file.fileno())
            if found.st_blocks and found.st_blocks * 512 * HOLES < found.st_size:
                raise BadFile(path, f"has {in_bytes(found.st_size)}, most of which was never written")
            if found.st_ino != self.inode or found.st_size < self.offset:
                another = bool(self.offset)
                self.offset, self.inode = 0, found.st_ino
            file.seek(self.offset)
            data = file.read(min(found.st_size - self.offset, MOST_AT_ONCE))
            whole = data[: data.rfind(b"\n") + 1]
            self.unread = bool(whole) and self.offset + len(data) < found.st_size
            if len(data) == MOST_AT_ONCE and not whole:
                raise BadFile(path, f"has {in_bytes(len(data))} without a line break, and is no log of events")
            data = whole
        self.offset += len(data)
        return data, another


@dataclass
class NewLines:
    """What a file had that was not read yet."""

    file: EventFile
    another: bool
    """It took the place of the file that was read before."""
    many: list[Columns]
    single: list[tuple[int, dict[str, Any]]]
    size: int
    """Bytes."""


def known_files(run: Run) -> Iterator[int]:
    """The ranks that have written events."""
    with left_out():
        for name in names(run.path, run.path / "events", is_file):
            if re.fullmatch(r"rank-\d{5,9}\.jsonl", name) and int(name[5:-6]) < MOST_RANKS:
                yield int(name[5:-6])


def read_on(run: Run, file: EventFile) -> NewLines | None:
    """None: nothing is new."""
    data, another = file.more(run)
    if not data:
        return None
    return NewLines(file, another, *(read(data, is_own) if file.rank else read(data)), len(data))


def is_own(name: str) -> bool:
    """Whether it is a rank's alone; of what all share the first one's is taken."""
    return name in OWN or name.startswith((MEMORY, EXPOSED, BESIDE[0])) or name.endswith(BESIDE[1])


def helpers(run: Run, files: Sequence[EventFile]) -> Pool | None:
    """Processes to read them, where it is worth it. They are forked now: no other thread may run yet."""
    processes = min(os.cpu_count() or 1, MOST_PROCESSES, len(files))
    if processes < 2 or _size(run, files) < MUCH:
        return None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # one that is ended while it starts must end
    try:
        return multiprocessing.get_context("fork").Pool(processes, _heed_nobody)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _heed_nobody() -> None:
    """Ctrl-C is for the process that they help, which ends them; not by what that process does when it is ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _size(run: Run, files: Sequence[EventFile]) -> int:
    size = 0
    for file in files:
        with suppress(OSError):
            size += run.events_path(file.rank).stat().st_size - file.offset
    return size
