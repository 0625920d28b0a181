"""A collective that was launched, and what is told while a rank waits for it."""

from __future__ import annotations

from contextlib import ExitStack
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING

from phalanx.parallel.communication.instants import Instant, now

if TYPE_CHECKING:
    from phalanx.parallel.communication.traffic import Traffic


class Launched:
    """Entered while this rank can do nothing but wait for it; a second collective may belong to it."""

    __slots__ = ("_main", "_waits", "_watched", "axis", "cuda", "kind", "record", "since", "traffic")

    def __init__(self, traffic: Traffic, axis: str, kind: str, record: int | None, cuda: bool) -> None:
        """``record``: its number in the flight record; None: it is in a graph."""
        self.traffic, self.axis, self.kind, self.record, self.cuda = traffic, axis, kind, record, cuda
        self.since: Instant = now(True) if cuda else 0.0
        """When a GPU came to its launch, or was last past it."""
        self._waits: Instant = 0.0
        self._watched: ExitStack | None = None
        self._main = False

    def __enter__(self) -> None:
        traffic = self.traffic
        if get_ident() == traffic.main:
            self._main = True
            traffic.signs[2] = 1
        if self.record is not None:
            traffic.recorder.waiting(self.record)
        if self.cuda:
            self._waits = now(True)
        if traffic.wait_watchers:
            self._watched = ExitStack()
            for watcher in traffic.wait_watchers:
                self._watched.enter_context(watcher(self.axis, self.kind))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        traffic = self.traffic
        if self._watched is not None:
            self._watched.__exit__(kind, error, trace)
            self._watched = None
        if kind is None:  # where it failed it was never left
            if self.record is not None:
                traffic.recorder.left(self.record, self.cuda)
            if self.cuda:
                ended = now(True)
                traffic.exposure.waited(self.axis, self.since, self._waits, ended)
                self.since = ended
        if self._main:
            traffic.signs[2] = 0
