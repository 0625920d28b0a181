"""Exchanges of several hops, carried on by two threads while the main thread computes.

The first thread waits for a hop and launches the next, the second ends them. Each takes them in the order in which the
main thread began them, so one that is late holds up no step that computes.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager
from queue import SimpleQueue

from phalanx.parallel.communication.pending import Pending

PATIENCE = 0.5
"""Seconds that are given to threads to end. After a failure one may wait for a rank that is gone."""


class InBackground(Pending):
    """An exchange that the threads have; `wait` returns, or raises, when they are done with it."""

    __slots__ = ("_done", "_error", "pending")

    def __init__(self, pending: Pending, waiting: AbstractContextManager[None]) -> None:
        super().__init__((), None, waiting)
        self.pending, self._done = pending, threading.Event()
        self._error: BaseException | None = None

    @property
    def over(self) -> bool:
        return self._done.is_set()

    def advance(self) -> None:
        """The threads do."""

    def wait(self) -> None:
        with self._waiting:  # which is never left, if it raises
            self.ended()

    def ended(self) -> None:
        """On another thread: return, or raise, when it is."""
        self._done.wait()
        if self._error is not None:
            raise self._error

    def hop(self, last: bool) -> bool:
        """On a thread: whether there is more to do."""
        try:
            self.pending.wait() if last else self.pending.advance()
        except BaseException as error:  # the main thread raises it
            self._error = error
        if last or self._error is not None:
            self._done.set()
        return not self._done.is_set()


Hops = SimpleQueue[InBackground | None]
"""None: there will be no more."""


class Background:
    """The two threads, begun when they are first needed; they end with it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._hops: Hops = SimpleQueue()
        self._end: weakref.finalize[[Hops, list[threading.Thread]], Background] | None = None

    def take(self, pending: Pending, waiting: AbstractContextManager[None]) -> InBackground:
        """``waiting`` is entered while the main thread waits for it."""
        if self._end is None:
            ends: Hops = SimpleQueue()
            threads = [
                threading.Thread(target=work, args=given, name=f"exchanges along {self.name}", daemon=True)
                for work, given in ((_hop, (self._hops, ends)), (_finish, (ends,)))
            ]
            for thread in threads:
                thread.start()
            self._end = weakref.finalize(self, _ended, self._hops, threads)
        taken = InBackground(pending, waiting)
        self._hops.put(taken)
        return taken

    def close(self) -> None:
        """Let the threads end, once they have nothing left."""
        if self._end is not None:
            self._end()


def _hop(hops: Hops, ends: Hops) -> None:
    while (taken := hops.get()) is not None:
        if taken.hop(last=False):
            ends.put(taken)
        del taken
    ends.put(None)


def _finish(ends: Hops) -> None:
    while (taken := ends.get()) is not None:
        taken.hop(last=True)
        del taken


def _ended(hops: Hops, threads: list[threading.Thread]) -> None:
    hops.put(None)
    for thread in threads:
        thread.join(PATIENCE)
