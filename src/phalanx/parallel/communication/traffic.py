"""What a rank has said to others: counted by axis and kind, told to who watches, recorded, seen by its supervisor."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from torch import Tensor

from phalanx.flight import BYTES
from phalanx.parallel.communication.arrivals import Arrivals
from phalanx.parallel.communication.exposure import Exposure
from phalanx.parallel.communication.launched import Launched
from phalanx.parallel.communication.recorder import FlightRecorder

Watcher = Callable[[str, str, Tensor], None]
WaitWatcher = Callable[[str, str], AbstractContextManager[object]]


class Traffic:
    """All collectives and messages of the communicators that share it."""

    def __init__(self, signs: memoryview | None = None, recorder: FlightRecorder | None = None) -> None:
        """``signs``: memory that a supervisor lends, in which it sees `signs` even of a frozen process."""
        self.recorder = recorder or FlightRecorder(memoryview(bytearray(BYTES)), 0, 1, 0)
        """Keeps the last collectives; in memory of its own where nobody will read them."""
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
        self.main = threading.main_thread().ident
        self.exposure = Exposure(self.recorder)
        """What of a step is spent on them, by axis."""
        self._arrivals = Arrivals(signs, self.recorder.arrived) if signs is not None else None
        self._on_gpu = False
        self.in_graph = False
        """What is launched is recorded in a CUDA graph, and happens when that is replayed."""

    def launched(self, group: str, axis: str, size: int, kind: str, tensor: Tensor, share: float) -> Launched:
        """A collective of a group along an axis, of which this rank sends ``share`` times the tensor."""
        cuda = tensor.is_cuda
        key = axis, kind
        self.calls[key] += 1
        self.sent[key] += round(tensor.nbytes * share)
        if self.in_graph:
            self._on_gpu = True
            return Launched(self, axis, kind, None, cuda)
        arrivals = self._arrivals if cuda else None
        record = self.recorder.launched(group, axis, size, kind, tensor, arrivals is not None)
        for watcher in self.watchers:
            watcher(axis, kind, tensor)
        if arrivals is not None:
            self._on_gpu = True
            arrivals.launching(record)
        else:
            self.signs[0] += 1
        return Launched(self, axis, kind, record, cuda)

    def recorded(self, group: str, axis: str, size: int, kind: str, tensor: Tensor) -> Launched:
        """One that is not counted; who watches is told of messages that are received."""
        if kind == "receive":
            for watcher in self.watchers:
                watcher(axis, kind, tensor)
        record = None if self.in_graph else self.recorder.launched(group, axis, size, kind, tensor)
        return Launched(self, axis, kind, record, tensor.is_cuda)

    def doing(self, phase: str) -> None:
        """What this rank does from now on, for the flight record; nothing said is nothing new."""
        if phase:
            self.recorder.doing(phase)

    def alive(self) -> None:
        """A sign of life of a rank that has nobody to say anything to."""
        self.signs[0] += 1

    def begins(self, step: int) -> None:
        """A step begins, with the samples it needs."""
        self.recorder.step = step

    def start_step(self) -> Counter[tuple[str, str]]:
        """What is spent on collectives is counted from here on; what was `sent` until now."""
        self.exposure.start()
        return self.sent.copy()

    def end_step(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """What collectives took of it, ``exposed_AXIS`` and ``overlapped_AXIS``. ``seconds``: its own, by phase."""
        found = self.exposure.taken()
        if self._on_gpu:
            waited = sum(value for name, value in found.items() if name.startswith("exposed_"))
            self.recorder.on_device(sum(seconds.values()), waited)
        return found

    def sent_since(self, before: Counter[tuple[str, str]]) -> dict[str, int]:
        """Bytes by axis."""
        found: Counter[str] = Counter()
        for (axis, _), count in (self.sent - before).items():
            found[axis] += count
        return dict(found)
