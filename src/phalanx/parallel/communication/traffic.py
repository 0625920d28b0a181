"""What a rank has said to others: counted by axis and kind, told to who watches, recorded, seen by its supervisor."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from torch import Tensor

from phalanx.parallel.communication.arrivals import Arrivals
from phalanx.parallel.communication.exposure import UNCOUNTED, Exposure, Underway
from phalanx.parallel.communication.recorder import FlightRecorder

Watcher = Callable[[str, str, Tensor], None]
WaitWatcher = Callable[[str, str], AbstractContextManager[object]]


class Traffic:
    """All collectives and messages of the communicators that share it."""

    def __init__(self, signs: memoryview | None = None, recorder: FlightRecorder | None = None) -> None:
        """``signs``: memory that a supervisor lends, in which it sees `signs` even of a frozen process."""
        self.recorder = recorder
        """Keeps the last collectives, if anybody will read them."""
        self.sent: Counter[tuple[str, str]] = Counter()
        """Bytes that this rank has had to send, by axis and kind: what a good algorithm sends, which is what ours do,
        but for small messages that go to everybody at once."""
        self.calls: Counter[tuple[str, str]] = Counter()
        """How many collectives they were."""
        self.signs: memoryview | list[int] = [0, 0, 0] if signs is None else signs
        """How many this rank has come to in all; how many more it has launched, which its GPU has yet to come to;
        whether its main thread waits in one."""
        self.watchers: list[Watcher] = []
        """Told of every message or collective, when it is launched: its axis, its kind, and what this rank brings."""
        self.wait_watchers: list[WaitWatcher] = []
        """Each gives what is entered while this rank waits in one: its axis, its kind."""
        self._main = threading.main_thread().ident
        self.exposure = Exposure()
        """What of a step is spent on them, by axis."""
        self._arrivals = Arrivals(arrived=recorder.arrived if recorder else None)

    def launched(self, axis: str, kind: str, tensor: Tensor, share: float, record: int = 0) -> None:
        """A collective of which this rank sends ``share`` times the tensor; ``record``: what `recorded` said of it."""
        self.told(axis, kind, tensor)
        self.calls[axis, kind] += 1
        if tensor.is_cuda and isinstance(self.signs, memoryview):
            self._arrivals.launching(self.signs, record)
        else:
            self.signs[0] += 1
        self.sent[axis, kind] += round(tensor.numel() * tensor.element_size() * share)

    def recorded(self, group: str, axis: str, size: int, kind: str, tensor: Tensor, counted: bool = True) -> int:
        """The number of a collective in the flight record, as it is launched; 0: there is no record.

        ``counted``: `launched` is told of it too, and so when a GPU comes to it.
        """
        awaited = counted and tensor.is_cuda and isinstance(self.signs, memoryview)
        return self.recorder.launched(group, axis, size, kind, tensor, awaited) if self.recorder else 0

    def doing(self, phase: str) -> None:
        """What this rank does from now on, for the flight record; nothing said is nothing new."""
        if self.recorder and phase:
            self.recorder.doing(phase)

    def during(self, phase: str) -> AbstractContextManager[None]:
        return self.recorder.during(phase) if self.recorder else nullcontext()

    def alive(self) -> None:
        """A sign of life of a rank that has nobody to say anything to."""
        self.signs[0] += 1

    def begins(self, step: int) -> None:
        """A step begins, with the samples it needs."""
        if self.recorder:
            self.recorder.step = step

    def start_step(self) -> Counter[tuple[str, str]]:
        """What is spent on collectives is counted from here on; what was `sent` until now."""
        self.exposure.start()
        return self.sent.copy()

    def told(self, axis: str, kind: str, tensor: Tensor) -> None:
        """Who watches is told, and nothing is counted."""
        for watcher in self.watchers:
            watcher(axis, kind, tensor)

    @contextmanager
    def waiting(self, axis: str, kind: str, record: int = 0, underway: Underway = UNCOUNTED) -> Iterator[None]:
        """While this rank's main thread can do nothing but wait for others, in a collective that was `recorded`."""
        main = threading.get_ident() == self._main
        if main:
            self.signs[2] = 1
        if self.recorder and record:
            self.recorder.waiting(record)
        self.exposure.waits(underway)
        try:
            if self.wait_watchers:
                with ExitStack() as watched:
                    for watcher in self.wait_watchers:
                        watched.enter_context(watcher(axis, kind))
                    yield
            else:
                yield
            self.exposure.waited(underway)
            if self.recorder and record:
                self.recorder.left(record)  # not where it failed: it was never left
        finally:
            if main:
                self.signs[2] = 0
