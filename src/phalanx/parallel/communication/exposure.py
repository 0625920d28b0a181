"""What collectives cost a step, by axis: how long a rank stood waiting for them, how long they ran beside its work.

On a processor a collective is over when it is first seen to be: when a gradient is made, or another collective is
launched or waited for. On a GPU the device's own clock is read a step later, and it is taken to run until it is waited
for. Of several along one axis at once the time counts once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch.distributed as dist

from phalanx.parallel.communication.instants import Instant, elapsed, has_come, now


@dataclass(slots=True, eq=False)
class Underway:
    """A collective that was launched."""

    axis: str
    """Along which; "": it is not counted."""
    cuda: bool
    since: Instant
    """When it was launched, or last waited for."""
    waits: Instant = 0.0
    over: float = 0.0
    """When it was seen to be; 0: not yet."""
    works: Sequence[dist.Work] = ()


UNCOUNTED = Underway("", False, 0.0)


class Exposure:
    """Of one rank's steps, from `start` to `taken`."""

    def __init__(self) -> None:
        self._counting = False
        self._found: dict[tuple[str, str], float] = {}
        self._under_way: list[Underway] = []
        self._untold: deque[tuple[str, Instant, Instant, Instant]] = deque()
        """Of a GPU: the axis; when it was launched, waited for, and over."""
        self._covered: dict[str, Instant] = {}
        """By axis: up to when its time has been counted."""

    def start(self) -> None:
        """A step begins."""
        self._counting = True

    def launched(self, axis: str, cuda: bool) -> Underway:
        """A collective is launched next. What threads do behind the steps is not counted."""
        if not self._counting or not (cuda or threading.current_thread() is threading.main_thread()):
            return Underway("", cuda, 0.0)
        if cuda:  # in backward by a thread of autograd's
            return Underway(axis, cuda, now(cuda))
        self.look()
        found = Underway(axis, cuda, perf_counter())
        self._under_way.append(found)
        return found

    def look(self) -> None:
        """See which are over."""
        for one in self._under_way:
            if not one.over and one.works and all(work.is_completed() for work in one.works):
                one.over = perf_counter()

    def waits(self, one: Underway) -> None:
        """From here on this rank can do nothing but wait for it."""
        if one.axis:
            self.look()
            one.waits = now(one.cuda)

    def waited(self, one: Underway) -> None:
        """And now not any more."""
        if not one.axis:
            return
        ended = now(one.cuda)
        if one.cuda:
            self._untold.append((one.axis, one.since, one.waits, ended))
        else:
            self._count(one.axis, one.since, one.over or one.waits, one.waits, ended)
            if one in self._under_way:
                self._under_way.remove(one)
        one.since, one.over = ended, 0.0  # a second collective may belong to it

    def taken(self) -> dict[str, float]:
        """The step is over: seconds ``exposed_AXIS`` and ``overlapped_AXIS`` of all that is known by now."""
        while self._untold and has_come(self._untold[0][3]):
            axis, since, waits, ended = self._untold.popleft()
            self._count(axis, since, waits, waits, ended)
        found = {f"{what}_{axis}": seconds for (what, axis), seconds in self._found.items()}
        self._found.clear()
        self._under_way.clear()
        self._counting = False
        return found

    def _count(self, axis: str, since: Instant, over: Instant, waits: Instant, ended: Instant) -> None:
        covered = self._covered.get(axis)
        begun = since if covered is None or elapsed(covered, since) > 0 else covered
        self._add("overlapped", axis, max(0.0, elapsed(begun, over)))
        self._add("exposed", axis, elapsed(waits, ended))
        self._covered[axis] = ended

    def _add(self, what: str, axis: str, seconds: float) -> None:
        self._found[what, axis] = self._found.get((what, axis), 0.0) + seconds
