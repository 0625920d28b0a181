"""Collectives that are launched: counted, told to who watches, and noted in the flight record while a rank waits.

This is the plain twin of what `c/notes.c` has of it (`compiled_notes`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from threading import get_ident
from types import TracebackType

from torch import Tensor

from phalanx.parallel.communication.instants import Instant, now
from phalanx.parallel.communication.notes import Notes

Watcher = Callable[[str, str, Tensor], None]
WaitWatcher = Callable[[str, str], AbstractContextManager[object]]
Waited = Callable[[str, Instant, Instant, Instant], None]


class Launches:
    """All of the communicators that share it."""

    def __init__(
        self, notes: Notes, signs: memoryview, launching: Callable[[int], None] | None, waited: Waited
    ) -> None:
        """``signs``: as `Traffic` has them. ``launching``: told of records that a GPU has yet to come to, where
        anybody looks for that. ``waited``: told of instants of a GPU, along an axis, in which one was on its way."""
        self.notes, self.signs, self._launching, self.waited = notes, signs, launching, waited
        self.sent: Counter[tuple[str, str]] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.watchers: list[Watcher] = []
        self.wait_watchers: list[WaitWatcher] = []
        self.main = threading.main_thread().ident
        self.in_graph = False

    def launched(self, group: str, axis: str, size: int, kind: str, tensor: Tensor, share: float) -> Launched:
        """A collective of a group along an axis, of which this rank sends ``share`` times the tensor."""
        cuda = tensor.is_cuda
        key = axis, kind
        self.calls[key] += 1
        self.sent[key] += round(tensor.nbytes * share)
        if self.in_graph:
            return Launched(self, axis, kind, None, cuda)
        launching = self._launching if cuda else None
        record = self.notes.launched(group, axis, size, kind, tensor, launching is not None)
        for watcher in self.watchers:
            watcher(axis, kind, tensor)
        if launching is not None:
            launching(record)
        else:
            self.signs[0] += 1
        return Launched(self, axis, kind, record, cuda)

    def recorded(self, group: str, axis: str, size: int, kind: str, tensor: Tensor) -> Launched:
        """One that is not counted; who watches is told of messages that are received."""
        if kind == "receive":
            for watcher in self.watchers:
                watcher(axis, kind, tensor)
        record = None if self.in_graph else self.notes.launched(group, axis, size, kind, tensor)
        return Launched(self, axis, kind, record, tensor.is_cuda)


class Launched:
    """Entered while this rank can do nothing but wait for it; a second collective may belong to it."""

    __slots__ = ("_launches", "_main", "_since", "_waits", "_watched", "axis", "cuda", "kind", "record")

    def __init__(self, launches: Launches, axis: str, kind: str, record: int | None, cuda: bool) -> None:
        """``record``: its number in the flight record; None: it is in a graph."""
        self._launches, self.axis, self.kind, self.record, self.cuda = launches, axis, kind, record, cuda
        self._since: Instant = now(True) if cuda else 0.0
        """When a GPU came to its launch, or was last past it."""
        self._waits: Instant = 0.0
        self._watched: ExitStack | None = None
        self._main = False

    def __enter__(self) -> None:
        launches = self._launches
        if get_ident() == launches.main:
            self._main = True
            launches.signs[2] = 1
        if self.record is not None:
            launches.notes.waiting(self.record)
        if self.cuda:
            self._waits = now(True)
        if launches.wait_watchers:
            self._watched = ExitStack()
            for watcher in launches.wait_watchers:
                self._watched.enter_context(watcher(self.axis, self.kind))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        launches = self._launches
        if self._watched is not None:
            self._watched.__exit__(kind, error, trace)
            self._watched = None
        if kind is None:  # where it failed it was never left
            if self.record is not None:
                launches.notes.left(self.record, self.cuda)
            if self.cuda:
                ended = now(True)
                launches.waited(self.axis, self._since, self._waits, ended)
                self._since = ended
        if self._main:
            launches.signs[2] = 0
