"""What ranks print: labelled by rank, or once where all of a host print the same, in whole lines, and never lost.

A warning of Python's is told once, whichever ranks have it and whenever.

Ranks print into pipes, which a thread of the process that forked them reads. A line waits a moment for the same one of
the others. What a rank has printed is there to be read even if it was killed right after.
"""

from __future__ import annotations

import bisect
import codecs
import os
import re
import selectors
import sys
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from phalanx import streams

SAME_SECONDS = 0.5
"""How long a line waits for the others to print it too."""
PART_SECONDS = 2.0
"""How long the beginning of a line waits for its end."""
LONGEST = 1 << 16
"""A line of more characters is told in parts."""
QUIET_SECONDS = 0.2
"""After the ranks have ended: how long nothing must come before nothing more is waited for."""
LAST_SECONDS = 2.0
"""After the ranks have ended: how long what they started may go on printing."""


GAP = 1 << 40
"""Between the numbers of two lines that wait, so that others may come between them."""
MOST_WARNINGS = 1000
"""So many are remembered."""
LOOKED_AT = 16
"""So many of the first lines that wait are looked at for one that has waited long enough."""


WARNING = re.compile(r"\S.*:\d+: \w*Warning: ")
"""How a line with a warning of Python's begins."""


def in_one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning for people, without the line of code that warns."""
    return f"{filename}:{lineno}: {category.__name__}: {' '.join(str(message).split())}\n"


@dataclass(eq=False)
class PrintedLine:
    """A line that some ranks have printed."""

    text: str
    stream: int
    since: float
    number: int
    ranks: set[int] = field(default_factory=set)


class Merged:
    """Lines of several ranks, each rank's in its own order, those that are the same told once."""

    def __init__(self, ranks: range) -> None:
        self.ranks = ranks
        self.waiting: list[PrintedLine] = []
        """In the order in which they will be told, their numbers ascending."""
        self._same: dict[tuple[int, str], list[PrintedLine]] = {}
        """Those by stream and text."""
        self._last: dict[tuple[int, int], PrintedLine] = {}
        """The line that a rank printed last to a stream."""
        self._warned: set[str] = set()
        self._told = 0
        """The number of the line that was told last."""

    def add(self, rank: int, stream: int, text: str, now: float) -> None:
        """One that another rank has printed and this one has not, after its last; or a new one right after that."""
        before = self._last.get((rank, stream))
        last = max(self._told, before.number if before else 0)
        same = self._same.setdefault((stream, text), [])
        found = bisect.bisect_right(same, last, key=_number)
        if found == len(same):
            place = bisect.bisect_right(self.waiting, last, key=_number)
            self.waiting.insert(place, PrintedLine(text, stream, now, self._number_at(place)))
            same.append(self.waiting[place])
        line = same[found]
        line.ranks.add(rank)
        self._last[rank, stream] = line

    def _number_at(self, place: int) -> int:
        """Between those of its neighbours, which get others where there is none left."""
        before = self.waiting[place - 1].number if place else self._told
        if place == len(self.waiting):
            return before + GAP
        if self.waiting[place].number - before < 2:
            for number, line in enumerate(self.waiting[place:], 2):
                line.number = before + number * GAP
        return (before + self.waiting[place].number) // 2

    def due(self, now: float) -> Iterator[tuple[int, str]]:
        """What need not wait any more, in order: the stream and the line."""
        while self.waiting:
            line = self.waiting[0]
            if len(line.ranks) < len(self.ranks):
                oldest = min(waiting.since for waiting in self.waiting[:LOOKED_AT])
                if now - oldest < SAME_SECONDS:
                    return
            self._told = line.number
            del self.waiting[0]
            same = self._same[line.stream, line.text]
            same.remove(line)
            if not same:
                del self._same[line.stream, line.text]
            if not self._known_warning(line):
                yield line.stream, self._label(line.ranks) + line.text

    def _known_warning(self, line: PrintedLine) -> bool:
        """Whether it is a warning that was told before."""
        if line.stream != 2 or line.text in self._warned or not WARNING.match(line.text):
            return line.stream == 2 and line.text in self._warned
        if len(self._warned) < MOST_WARNINGS:
            self._warned.add(line.text)
        return False

    def _label(self, ranks: set[int]) -> str:
        if len(ranks) == len(self.ranks) > 1:
            return ""
        named = ", ".join(map(str, sorted(ranks)))
        return f"[rank{'s' if len(ranks) > 1 else ''} {named}] "


def _number(line: PrintedLine) -> int:
    return line.number


class Printing:
    """Pipes for the ranks of this host, and the thread that reads them."""

    def __init__(self, ranks: int, first: int) -> None:
        self._pipes = [(os.pipe(), os.pipe()) for _ in range(ranks)]
        self._merged = Merged(range(first, first + ranks))
        self._parts: dict[tuple[int, int], tuple[str, float]] = {}
        """By rank and stream, the beginning of a line, and since when."""
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders: dict[tuple[int, int], codecs.IncrementalDecoder] = defaultdict(lambda: decoder("replace"))
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._read, name="printing", daemon=True)

    def in_rank(self, local: int) -> None:
        """On a rank, right after the fork."""
        out, err = self._pipes[local]
        for mine, pipes in ((rank == local, pipes) for rank, pipes in enumerate(self._pipes)):
            for reading, writing in pipes:
                with suppress(OSError):  # the process that forked has let go of it before
                    os.close(reading)
                if not mine:
                    with suppress(OSError):
                        os.close(writing)
        streams.led_elsewhere(out[1], err[1])
        warnings.formatwarning = in_one_line

    def start(self) -> None:
        """After the last fork: this process writes nothing into them."""
        for pipes in self._pipes:
            for _, writing in pipes:
                os.close(writing)
        self._thread.start()

    def close(self) -> None:
        """When ranks have ended: tell what is left of what they printed."""
        if self._thread.ident is None:
            for pipes in self._pipes:
                for descriptors in pipes:
                    for descriptor in descriptors:
                        os.close(descriptor)
            return
        self._ending.set()
        self._thread.join()

    def _read(self) -> None:
        first = self._merged.ranks.start
        with selectors.DefaultSelector() as selector:
            for rank, pipes in enumerate(self._pipes, first):
                for stream, (reading, _) in enumerate(pipes, 1):
                    selector.register(reading, selectors.EVENT_READ, (rank, stream))
            quiet, ended = time.monotonic(), None
            while selector.get_map():
                busy = self._merged.waiting or self._parts
                ready = selector.select(SAME_SECONDS / 3 if busy or self._ending.is_set() else 1.0)
                now = time.monotonic()
                for key, _ in ready:
                    rank, stream = key.data
                    if data := os.read(key.fd, 1 << 16):
                        self._take(rank, stream, data, now)
                    else:
                        selector.unregister(key.fd)
                        os.close(key.fd)
                quiet = now if ready else quiet
                self._complete(now)
                self._tell(self._merged.due(now))
                if self._ending.is_set():
                    ended = ended or now
                    if now - quiet > QUIET_SECONDS or now - ended > LAST_SECONDS:
                        break
            for key in list(selector.get_map().values()):  # held by what outlives the ranks
                os.close(key.fd)
        self._complete(float("inf"))
        self._tell(self._merged.due(float("inf")))

    def _take(self, rank: int, stream: int, data: bytes, now: float) -> None:
        part, since = self._parts.pop((rank, stream), ("", now))
        *lines, rest = (part + self._decoders[rank, stream].decode(data)).split("\n")
        for line in lines:
            self._merged.add(rank, stream, _shown(line), now)
        if rest:
            self._parts[rank, stream] = (rest, now if lines else since)

    def _complete(self, now: float) -> None:
        """Beginnings of lines that have waited long enough for their ends."""
        for (rank, stream), (part, since) in list(self._parts.items()):
            if now - since > PART_SECONDS or len(part) >= LONGEST:
                del self._parts[rank, stream]
                self._merged.add(rank, stream, _shown(part), min(now, time.monotonic()))

    @staticmethod
    def _tell(lines: Iterator[tuple[int, str]]) -> None:
        for stream, text in lines:
            file = sys.stdout if stream == 1 else sys.stderr
            clear = "\r\x1b[K" if sys.stdout.isatty() else ""  # over the line that renews itself there
            known = file.encoding or "utf-8"  # what it cannot write is shown as far as it can
            with suppress(OSError, ValueError):
                print(clear + text.encode(known, "replace").decode(known), file=file, flush=True)


def _shown(line: str) -> str:
    """A line as a terminal would show it: what was printed after a return of its own is over what was before."""
    return line.rstrip("\r").rpartition("\r")[2]
