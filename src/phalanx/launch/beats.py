"""Signs of life: memory that a host's ranks write and its supervisor reads, also when a rank is frozen or gone."""

from __future__ import annotations

import mmap
import statistics
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

LEAST_SECONDS = 5.0
TIMES_MEDIAN = 10
"""A rank may stand still for so many times its own median step, and for the seconds above in any case."""
MOVES, ALLOWED, STEPS, LAUNCHED = range(4)


class Beats:
    """By rank of this host: how often it has moved, how long it may stand still, steps done, collectives launched."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._memory = mmap.mmap(-1, ranks * 4 * 8)  # shared with every process forked after this
        self.numbers = memoryview(self._memory).cast("q")

    def clear(self) -> None:
        """A new generation begins."""
        self.numbers[:] = memoryview(bytes(len(self.numbers) * 8)).cast("q")

    def row(self, rank: int) -> memoryview:
        return self.numbers[4 * rank : 4 * rank + 4]

    def steps(self) -> int:
        """How many steps of the run all ranks have finished."""
        return min(self.row(rank)[STEPS] for rank in range(self.ranks))


class Beat:
    """A rank's own row: it learns from its steps how long the next may take."""

    def __init__(self, row: memoryview, patience: float) -> None:
        """``patience`` holds while nothing has been learned: for the first steps, and for what is no step."""
        self.row, self.patience = row, patience
        self._seconds: deque[float] = deque(maxlen=32)
        self._last: float | None = None
        self.unhurried()

    def unhurried(self, for_ever: bool = False) -> None:
        """What comes now is no step but an evaluation, or a file, which may take as long as it takes."""
        self.row[ALLOWED] = 0 if for_ever else round(1000 * self.patience)
        self.row[MOVES] += 1
        self._last = None

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

    def __init__(self, beats: Beats, first: int = 0, leniency: float = 1.0) -> None:
        """``first``: the number of this host's first rank."""
        self.beats, self.first, self.leniency = beats, first, leniency
        self._moves = dict.fromkeys(range(first, first + beats.ranks), -1)
        self._still = dict.fromkeys(self._moves, 0.0)
        self._looked = time.monotonic()

    def look(self, pids: dict[int, int]) -> tuple[int, str] | None:
        """Called often, with the processes that run by rank: one that is stuck, and in what way."""
        now = time.monotonic()
        passed = min(now - self._looked, 0.5)  # more would mean that this process itself was held up
        self._looked = now
        late = []
        for rank in pids:
            row = self._row(rank)
            if row[MOVES] != self._moves[rank]:
                self._moves[rank], self._still[rank] = row[MOVES], 0.0
            else:
                self._still[rank] += passed
            too_long = row[ALLOWED] and 1000 * self._still[rank] > self.leniency * row[ALLOWED]
            if too_long or (self._still[rank] > self.leniency * LEAST_SECONDS and _frozen(pids[rank])):
                late.append(rank)
        return self._culprit(late, pids) if late else None

    def _culprit(self, late: list[int], pids: dict[int, int]) -> tuple[int, str]:
        for rank, pid in pids.items():
            if _frozen(pid):
                return rank, f"has been stopped (SIGSTOP) and did not go on for {self._still[rank]:.0f} s"
        launched = {rank: self._row(rank)[LAUNCHED] for rank in pids}
        behind = min(launched, key=lambda rank: launched[rank])
        still = f"for {self._still[behind]:.0f} s, where its steps take {self._usual(behind):.1f} s at most"
        if launched[behind] < max(launched.values()):
            waiting = [rank for rank in pids if launched[rank] > launched[behind]]
            return behind, f"has not moved {still}; rank {', '.join(map(str, waiting))} waits for it"
        return late[0], f"and all others have waited {still}, in the same collective: look at the network"

    def _row(self, rank: int) -> memoryview:
        return self.beats.row(rank - self.first)

    def _usual(self, rank: int) -> float:
        return self._row(rank)[ALLOWED] / 1000 / TIMES_MEDIAN


def _frozen(pid: int) -> bool:
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "Tt"
    return False
