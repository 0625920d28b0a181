"""Signs of life: memory that a host's ranks write and its supervisor reads, also when a rank is frozen or gone.

Slow is not stuck. A rank that has been still for too long is left alone while it waits in a collective, since another
holds it up, and while it computes, reads or writes, or its compiler and its data workers do: as long as its timeout
allows. One that does none of these is stuck.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LEAST_SECONDS = 5.0
TIMES_MEDIAN = 10
"""A rank may stand still for so many times its own median step, and for the seconds above in any case."""
BUSY = 0.1
"""A process that uses so much of a core computes."""
WINDOW_SECONDS = 1.0
"""Over which that is measured."""
MOVES, ALLOWED, STEPS, PATIENCE, ARRIVED, AHEAD, WAITING = range(7)
COLUMNS = 7


class Heartbeats:
    """By rank of this host: how often it has moved, how long it may stand still (0: for ever), steps done, how long it
    may stand still while it is busy, and what `Traffic.signs` says of it."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._memory = mmap.mmap(-1, ranks * COLUMNS * 8)  # shared with every process forked after this
        self.numbers = memoryview(self._memory).cast("q")

    def clear(self) -> None:
        """A new generation begins."""
        self.numbers[:] = memoryview(bytes(len(self.numbers) * 8)).cast("q")

    def row(self, rank: int) -> memoryview:
        return self.numbers[COLUMNS * rank : COLUMNS * (rank + 1)]

    def steps(self) -> int:
        """How many steps of the run all ranks have finished."""
        return min(self.row(rank)[STEPS] for rank in range(self.ranks))

    def furthest(self) -> int:
        """How many steps any rank has finished."""
        return max(self.row(rank)[STEPS] for rank in range(self.ranks))


class RankHeartbeat:
    """A rank's own row: it learns from its steps how long the next may take."""

    def __init__(self, row: memoryview, patience: float) -> None:
        """``patience`` holds while nothing has been learned: for the first steps, and for what is no step."""
        self.row, self.patience = row, patience
        self.row[PATIENCE] = round(1000 * patience)
        self._seconds: deque[float] = deque(maxlen=32)
        self._last: float | None = None
        self.may_take_long()

    def may_take_long(self, for_ever: bool = False) -> None:
        """What comes now is no step but an evaluation, or a file, which may take as long as it takes."""
        self.row[ALLOWED] = 0 if for_ever else round(1000 * self.patience)
        self.row[MOVES] += 1
        self._last = None

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """While samples are waited for: they may come from a slow disk, or from afar."""
        allowed, self.row[ALLOWED] = self.row[ALLOWED], self.row[PATIENCE]
        yield
        self.row[ALLOWED] = allowed
        self.row[MOVES] += 1

    def stepped(self, step: int) -> None:
        """A step is done."""
        now = time.monotonic()
        if self._last is not None:
            self._seconds.append(now - self._last)
        self._last = now
        if len(self._seconds) >= 3:
            learned = max(LEAST_SECONDS, TIMES_MEDIAN * statistics.median(self._seconds))
            self.row[ALLOWED] = round(1000 * min(self.patience, learned))
        self.row[STEPS] = step
        self.row[MOVES] += 1


class Watch:
    """The supervisor's eyes: which ranks stand still for too long, and which of them the others wait for."""

    def __init__(self, heartbeats: Heartbeats, first: int = 0, leniency: float = 1.0, alone: bool = True) -> None:
        """``first``: the number of this host's first rank; ``alone``: there are no ranks on other hosts."""
        self.heartbeats, self.first, self.leniency, self.alone = heartbeats, first, leniency, alone
        ranks = range(first, first + heartbeats.ranks)
        self._signs: dict[int, tuple[int, ...]] = dict.fromkeys(ranks, ())
        self._still = dict.fromkeys(ranks, 0.0)
        self._used: dict[int, tuple[float, float]] = {}
        """When a rank that is still was last looked at, and the seconds of processor it had used."""
        self._looked = time.monotonic()

    def look(self, pids: dict[int, int]) -> tuple[int, str] | None:
        """Called often, with the processes that run by rank: one that is stuck, and in what way."""
        now = time.monotonic()
        passed = min(now - self._looked, 0.5)  # more would mean that this process itself was held up
        self._looked = now
        for rank in pids:
            signs = tuple(self._row(rank)[column] for column in (MOVES, ARRIVED, WAITING))  # to leave a wait is a move
            self._still[rank] = 0.0 if signs != self._signs[rank] else self._still[rank] + passed
            self._signs[rank] = signs
            if self._still[rank] < self.leniency * LEAST_SECONDS / 2:
                self._used.pop(rank, None)
            elif rank not in self._used:
                self._used[rank] = now, _processor_seconds(pids[rank])
        for rank, pid in pids.items():
            if self._still[rank] > self.leniency * LEAST_SECONDS and state_of(pid) in "Tt":
                return rank, f"has been stopped (SIGSTOP) and did not go on for {self._still[rank]:.0f} s"
        late = [rank for rank in pids if self._late(rank, ALLOWED)]
        return self._culprit(late, pids) if late else None

    def _late(self, rank: int, column: int) -> bool:
        allowed = self._row(rank)[column]
        return bool(allowed) and 1000 * self._still[rank] > self.leniency * allowed

    def _culprit(self, late: list[int], pids: dict[int, int]) -> tuple[int, str] | None:
        """Some are late: the rank that all wait for, if it is stuck."""
        arrived = {rank: self._row(rank)[ARRIVED] for rank in pids}
        behind = min(pids, key=lambda rank: (self._waits(rank), arrived[rank]))
        if self._waits(behind):
            stuck = self.alone and len(late) == len(pids)  # otherwise they wait for a rank that is elsewhere, or slow
        else:
            stuck = behind in late and not self._busy(behind, pids[behind])
        if not stuck and not self._late(behind, PATIENCE):
            return None
        still = f"for {self._still[behind]:.0f} s, where its steps take {self._usual(behind):.1f} s at most"
        waiting = [r for r in pids if arrived[r] > arrived[behind] or self._waits(r) > self._waits(behind)]
        if waiting:
            return behind, f"has not moved {still}; rank {', '.join(map(str, waiting))} waits for it"
        if self._waits(behind):
            return behind, f"and all others have waited {still}, in the same collective: look at the network"
        return behind, f"has not moved {still}"

    def _waits(self, rank: int) -> bool:
        """Whether a rank is in a collective; a GPU is where it has yet to come to others that were launched."""
        row = self._row(rank)
        return bool(row[WAITING] or row[AHEAD])

    def _busy(self, rank: int, pid: int) -> bool:
        """Whether a rank, or a process that it has started, computes or is at a file."""
        if any(state_of(member) in "RD" for member in family(pid)):  # also where others leave it no processor
            return True
        now, used = time.monotonic(), _processor_seconds(pid)
        before, had = self._used.get(rank, (now, used))
        if now - before < WINDOW_SECONDS:
            return True  # too soon to tell
        self._used[rank] = now, used
        return used - had > BUSY * (now - before)

    def _row(self, rank: int) -> memoryview:
        return self.heartbeats.row(rank - self.first)

    def _usual(self, rank: int) -> float:
        return self._row(rank)[ALLOWED] / 1000 / TIMES_MEDIAN


def family(pid: int) -> Iterator[int]:
    """A process and all that it has started."""
    yield pid
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from family(int(child))


def _stat(path: str) -> list[str]:
    """What Linux tells of a process or a thread, from its state on; nothing of one that is gone, or elsewhere."""
    with suppress(OSError, IndexError):
        return Path(path, "stat").read_text().rsplit(")", 1)[1].split()
    return []


def state_of(pid: int) -> str:
    return (_stat(f"/proc/{pid}") or [" "])[0]


def _processor_seconds(pid: int) -> float:
    """Of a rank's main thread, whose helpers may spin while it sleeps, and of all processes that it has started."""
    used = _stat(f"/proc/{pid}/task/{pid}")[11:13]
    for child in family(pid):
        if child != pid:
            used += _stat(f"/proc/{child}")[11:13]
    return sum(map(int, used)) / os.sysconf("SC_CLK_TCK")
