"""The one on a host that writes its ranks' events into the run's folder, behind their steps.

A rank puts its events into memory that it shares with its supervisor (`event_ring`), where a thread takes them: a
folder that all hosts share has one writer a host, and a slow disk holds up no rank.
"""

from __future__ import annotations

import mmap
import pickle
import threading

from phalanx import streams
from phalanx.event_ring import BYTES, IS_SHARED, PAUSE, EventRing
from phalanx.events import EventAppender, say
from phalanx.run import Run

TAKE_SECONDS = 0.05
"""Between two looks at what ranks have put."""
LAST_SECONDS = 10.0
"""How long a folder that does not answer is waited for at the end of a generation."""


class EventWriter:
    """Of one host, for one generation after another."""

    def __init__(self, run: Run, ranks: int) -> None:
        self.run, self.ranks = run, ranks
        self._first = 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._refused: set[int] = set()
        """Ranks of which that has been said."""
        self.begin(0)

    def begin(self, first: int) -> None:
        """A new generation, whose first rank here has this number; before it is forked."""
        memory = memoryview(mmap.mmap(-1, self.ranks * BYTES))  # shared with every process forked after this
        self.rings = [EventRing(memory[rank * BYTES : (rank + 1) * BYTES]) for rank in range(self.ranks)]
        """By rank of this host. New ones: the thread of a folder that hung may yet read the last."""
        self._first = first

    def start(self) -> None:
        """Ranks have been forked: not before, since a thread is not."""
        self._over = threading.Event()
        given = self.rings, self._first, self._over
        self._thread = threading.Thread(target=self._taking, args=given, name="event writer", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Ranks have ended: what they left is written."""
        if self._thread is not None:
            self._over.set()
            self._thread.join(LAST_SECONDS)
            self._thread = None

    def _taking(self, rings: list[EventRing], first: int, over: threading.Event) -> None:
        files: dict[int, EventAppender] = {}
        self._refused.clear()
        while not over.wait(TAKE_SECONDS):
            self._take(rings, first, files)
        self._take(rings, first, files)
        for file in files.values():
            file.close()

    def _take(self, rings: list[EventRing], first: int, files: dict[int, EventAppender]) -> None:
        for rank, ring in enumerate(rings, first):
            try:
                for piece, end in ring.pieces():
                    if rank not in files:
                        pause, shared = ring.header[PAUSE] / 1000, bool(ring.header[IS_SHARED])
                        files[rank] = EventAppender(self.run, rank, pause, shared=shared)
                    files[rank].take(*pickle.loads(piece))
                    ring.take(end)
            except Exception as error:  # what one rank left must not cost the others theirs; it is tried again
                if rank not in self._refused:
                    say(f"   note  events of rank {rank} cannot be written: {error}; they wait", streams.stderr())
                self._refused.add(rank)
