"""What a rank has said to others: counted by axis and kind, told to who watches, recorded, seen by its supervisor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from phalanx.flight import BYTES
from phalanx.parallel.communication.arrivals import Arrivals
from phalanx.parallel.communication.compiled_notes import fastest
from phalanx.parallel.communication.exposure import Exposure
from phalanx.parallel.communication.recorder import FlightRecorder


class Traffic:
    """All collectives and messages of the communicators that share it."""

    def __init__(self, signs: memoryview | None = None, recorder: FlightRecorder | None = None) -> None:
        """``signs``: memory that a supervisor lends, in which it sees `signs` even of a frozen process."""
        self.recorder = recorder or FlightRecorder(memoryview(bytearray(BYTES)), 0, 1, 0)
        """Keeps the last collectives; in memory of its own where nobody will read them."""
        self.signs = memoryview(bytearray(24)).cast("q") if signs is None else signs
        """How many this rank has come to in all; how many more it has launched, which its GPU has yet to come to;
        whether its main thread waits in one."""
        self.exposure = Exposure(self.recorder)
        """What of a step is spent on them, by axis."""
        self._arrivals = Arrivals(signs, self.recorder.arrived) if signs is not None else None
        launching = self._arrivals.launching if self._arrivals is not None else None
        self._launches = launches = fastest().Launches(self.recorder.notes, self.signs, launching, self.exposure.waited)
        self._in_graphs = False
        self.launched, self.recorded = launches.launched, launches.recorded
        self.watchers = launches.watchers
        """Told of every message or collective, when it is launched: its axis, its kind, and what this rank brings."""
        self.wait_watchers = launches.wait_watchers
        """Each gives what is entered while this rank waits in one: its axis, its kind."""

    @property
    def sent(self) -> Counter[tuple[str, str]]:
        """Bytes that this rank has had to send, by axis and kind: what a good algorithm sends, which is what ours do,
        but for small messages that go to everybody at once. Ask again after more of them."""
        return self._launches.sent

    @property
    def calls(self) -> Counter[tuple[str, str]]:
        """How many collectives they were."""
        return self._launches.calls

    @property
    def in_graph(self) -> bool:
        """What is launched is recorded in a CUDA graph, and happens when that is replayed."""
        return self._launches.in_graph

    @in_graph.setter
    def in_graph(self, recorded: bool) -> None:
        self._launches.in_graph = recorded
        self._in_graphs |= recorded

    def put_back(self, sent: Counter[tuple[str, str]], calls: Counter[tuple[str, str]]) -> None:
        """What was counted since then has not happened."""
        for counted, before in ((self.sent, sent), (self.calls, calls)):
            counted.clear()
            counted.update(before)

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
        if self._in_graphs or (self._arrivals is not None and self._arrivals.begun):
            waited = sum(value for name, value in found.items() if name.startswith("exposed_"))
            self.recorder.on_device(sum(seconds.values()), waited)
        return found

    def sent_since(self, before: Counter[tuple[str, str]]) -> dict[str, int]:
        """Bytes by axis."""
        found: Counter[str] = Counter()
        for (axis, _), count in (self.sent - before).items():
            found[axis] += count
        return dict(found)
