"""A number of each rank in each step: a table that grows, with gaps where nothing is known."""

from __future__ import annotations

import numpy as np

from phalanx.words import round_number

LEAST_ROOM, ROOM_A_BYTE = 1 << 22, 8
"""Numbers that the tables of a run may hold whatever was read, and for each byte that was."""


class NoRoom(Exception):
    """Ranks or steps are named that would take far more room than all that was read."""


class Room:
    """How many numbers the tables of a run may hold: as many as its events may need, and no more."""

    def __init__(self) -> None:
        self._left = LEAST_ROOM

    def read(self, size: int) -> None:
        """So many bytes of events were read."""
        self._left += ROOM_A_BYTE * size

    def take(self, count: int) -> None:
        """Use some of it; `NoRoom` where there is not so much."""
        if count > self._left:
            raise NoRoom
        self._left -= count


class StepGrid:
    """Ranks by steps. What was noted of a step that was done again is forgotten by `cut`."""

    def __init__(self, kind: type[np.floating] = np.float64, ranks: int = 0, room: Room | None = None) -> None:
        """``ranks``: that so many will come is known. ``room``: what all tables of a run share."""
        self._values = np.full((ranks, 0), np.nan, kind)
        self.ranks = self.steps = 0
        self._room = room

    @property
    def values(self) -> np.ndarray:
        return self._values[: self.ranks, : self.steps]

    def put(self, rank: int, steps: np.ndarray, values: np.ndarray | float) -> None:
        if len(steps):
            self._hold(rank + 1, int(steps.max()) + 1)
            self._values[rank, steps] = values

    def fill(self, rank: int, steps: np.ndarray, widths: np.ndarray, values: np.ndarray) -> None:
        """Put a number into the gaps of the ``widths`` steps that end with each of these."""
        at = (
            np.repeat(steps + 1 - widths, widths)
            + np.arange(widths.sum())
            - np.repeat(widths.cumsum() - widths, widths)
        )
        every = np.repeat(values, widths)
        known = at >= 0
        if known.any():
            self._hold(rank + 1, int(at.max()) + 1)
            known &= np.isnan(self._values[rank, np.maximum(at, 0)])
            self._values[rank, at[known]] = every[known]

    def cut(self, rank: int, step: int) -> None:
        """Of a rank this step and all after it are to be done again."""
        if rank < self.ranks:
            self._values[rank, step : self.steps] = np.nan

    def leave_out(self, steps: list[int]) -> None:
        """Of all ranks these steps do not count."""
        self._values[: self.ranks, [step for step in steps if step < self.steps]] = np.nan

    def within(self, first: int, last: int, ranks: int | None = None) -> np.ndarray:
        """These steps, of as many ranks, gaps where there are none."""
        found = np.full((self.ranks if ranks is None else ranks, max(0, last - first)), np.nan, self._values.dtype)
        known = self.values[: len(found), first:last]
        found[: known.shape[0], : known.shape[1]] = known
        return found

    def _hold(self, ranks: int, steps: int) -> None:
        rows, columns = self._values.shape
        if ranks > rows or steps > columns:
            size = (_grown(rows, ranks), _grown(columns, steps))
            if self._room is not None:
                self._room.take(size[0] * size[1] - rows * columns)
            values = np.full(size, np.nan, self._values.dtype)
            values[:rows, :columns] = self._values
            self._values = values
        self.ranks, self.steps = max(self.ranks, ranks), max(self.steps, steps)


class StepChanges:
    """A number of each rank that is noted when it changes, and holds until it does again."""

    def __init__(self) -> None:
        self._known: dict[int, dict[int, float]] = {}

    @property
    def ranks(self) -> list[int]:
        """Those of which any is known."""
        return sorted(rank for rank, known in self._known.items() if known)

    def put(self, rank: int, steps: np.ndarray, values: np.ndarray | float) -> None:
        known = self._known.setdefault(rank, {})
        known.update(zip(steps.tolist(), np.broadcast_to(values, len(steps)).tolist(), strict=True))

    def cut(self, rank: int, step: int) -> None:
        """Of a rank this step and all after it are to be done again."""
        known = self._known.get(rank, {})
        self._known[rank] = {at: value for at, value in known.items() if at < step}

    def within(self, rank: int, first: int, last: int) -> np.ndarray:
        """In these steps; a gap before the first that is known."""
        known = self._known.get(rank, {})
        steps = np.array(sorted(known), np.int64)
        values = np.array([np.nan, *(known[step] for step in steps.tolist())])
        return values[np.searchsorted(steps, np.arange(first, last), side="right")]


def _grown(size: int, needed: int) -> int:
    return size if needed <= size else max(needed, size + size // 2)


def bucket_width(steps: int, columns: int) -> int:
    """How many steps a column of the screen stands for: 1, 2, 5, 10 and so on, so that it changes seldom."""
    return round_number(max(1, steps) / max(1, columns))


def thinned(values: np.ndarray, first: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The least and the most of each bucket of ``width`` steps along the last axis, which begins with step ``first``.

    Buckets begin at multiples of their width. No spike is lost; a bucket of gaps is one.
    """
    if not values.shape[-1] or width == 1:
        return values, values
    begins = np.arange(first - first % width, first + values.shape[-1], width)
    begins = np.maximum(begins - first, 0)
    return np.fmin.reduceat(values, begins, axis=-1), np.fmax.reduceat(values, begins, axis=-1)
