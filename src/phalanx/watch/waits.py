"""Who waits for whom: ranks that never came to a collective, that came to another one, or that wait in a ring."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from phalanx.flight import DTYPES, KINDS, OUTSIDE, UNEVEN, Flight, Launch

MESSAGES = tuple(KINDS.index(kind) for kind in ("send", "receive"))
MAY_DIFFER = tuple(KINDS.index(kind) for kind in UNEVEN)
Flights = dict[int, Flight]


class Waits:
    """Of all ranks whose records there are."""

    def __init__(self, flights: Flights) -> None:
        self.flights = flights
        inside = {rank: flight.inside() for rank, flight in flights.items()}
        self.inside = {rank: launch for rank, launch in inside.items() if launch is not None}
        """By rank, the collective that it is in."""
        self.awaited = {rank: self.behind(launch) for rank, launch in self.inside.items()}
        """By rank that is in a collective, those that have not come to it."""

    def members(self, group: str) -> list[int]:
        """Ranks of a group; of one that all ranks are in also those that have never spoken there."""
        found = [rank for rank, flight in self.flights.items() if group in flight.groups]
        whole = [rank for rank in found[:1] if self.flights[rank].groups[group].size == self.flights[rank].world]
        return list(self.flights) if whole else found

    def arrived(self, rank: int, group: str) -> int:
        """How many collectives of a group a rank has come to."""
        row = self.flights[rank].groups.get(group)
        return row.arrived if row else 0

    def behind(self, launch: Launch) -> list[int]:
        """Members of its group that have not come to a collective."""
        return [rank for rank in self.members(launch.group) if self.arrived(rank, launch.group) < launch.sequence]

    def unknown(self, launch: Launch) -> int:
        """How many members of its group have left no record of it."""
        return self.flights[launch.rank].groups[launch.group].size - len(self.members(launch.group))

    def culprits(self) -> dict[int, list[int]]:
        """Ranks that others wait for and that wait for nobody, with those who wait for them, directly or not."""
        found: dict[int, list[int]] = defaultdict(list)
        for rank in self.inside:
            for end in self._ends(rank):
                found[end].append(rank)
        return dict(sorted(found.items(), key=lambda each: -len(each[1])))

    def _ends(self, rank: int) -> set[int]:
        """Who is at the end of what a rank waits for."""
        seen, ends, to_visit = {rank}, set(), list(self.awaited.get(rank, ()))
        while to_visit:
            other = to_visit.pop()
            if other in seen:
                continue
            seen.add(other)
            if further := self.awaited.get(other):
                to_visit += further
            else:
                ends.add(other)
        return ends

    def ring(self) -> list[int]:
        """Ranks of which each waits for the next, and the last for the first; nothing if there are none."""
        for first in self.awaited:
            path, seen = [first], {first}
            while following := self.awaited.get(path[-1]):
                rank = following[0]
                if rank in seen:
                    return path[path.index(rank) :]
                path.append(rank)
                seen.add(rank)
        return []

    def odd_one(self, ring: list[int]) -> int | None:
        """Of ranks that wait for each other, the one that is elsewhere than most; None: no one is.

        That is who alone came to its collective, where more have come to the others'. Where as many did, it is who
        called one through torch itself: those of ours are launched by all ranks alike.
        """
        launches = [self.inside[rank] for rank in ring]
        present = {each.rank: 1 - len(self.awaited[each.rank]) / self._size(each) for each in launches}
        alone = [each.rank for each in launches if len(self.awaited[each.rank]) == self._size(each) - 1]
        least = [rank for rank in alone if present[rank] == min(present.values())]
        if len(least) == 1 and len(ring) > 1:
            return least[0]
        outside = [each.rank for each in launches if each.axis == OUTSIDE]
        return outside[0] if len(outside) == 1 and outside[0] in least else None

    def _size(self, launch: Launch) -> int:
        return self.flights[launch.rank].groups[launch.group].size

    def alike(self, launches: list[Launch]) -> list[Launch]:
        """What ranks of other groups along the same axis brought to the collective of that number."""
        first, found = launches[0], []
        groups = {
            row.name for flight in self.flights.values() for row in flight.groups.values() if row.axis == first.axis
        }
        for group in groups - {first.group}:
            for rank in self.members(group):
                rows = self.flights[rank].along(group)
                found += [self.flights[rank].launch(row) for row in rows[rows["sequence"] == first.sequence][:1]]
        return found

    def apart(self) -> list[Launch]:
        """The first collective for which members of a group brought different things: one of each of them."""
        found: list[list[Launch]] = []
        for group in {group for flight in self.flights.values() for group in flight.groups}:
            records = {rank: self.flights[rank].along(group) for rank in self.members(group)}
            records = {rank: rows for rank, rows in records.items() if len(rows)}
            sequence = _first_apart(list(records.values()))
            if sequence is not None:
                found.append(
                    [
                        self.flights[rank].launch(rows[rows["sequence"] == sequence][0])
                        for rank, rows in records.items()
                        if (rows["sequence"] == sequence).any()
                    ]
                )
        return min(found, key=lambda launches: min(each.entered or 1 << 62 for each in launches), default=[])


def _first_apart(records: list[np.ndarray]) -> int | None:
    """The lowest number at which not all that have it brought the same."""
    sequences = np.concatenate([rows["sequence"] for rows in records]) if records else np.empty(0)
    brought = np.concatenate([_brought(rows) for rows in records]) if records else np.empty(0)
    order = np.lexsort((brought, sequences))
    sequences, brought = sequences[order], brought[order]
    differ = (sequences[1:] == sequences[:-1]) & (brought[1:] != brought[:-1])
    return int(sequences[1:][differ][0]) if differ.any() else None


def _brought(rows: np.ndarray) -> np.ndarray:
    """A number for kind, dtype and amount, the same where ranks go together."""
    kind = rows["kind"].astype(np.int64)
    dims = np.arange(4)[None] < (rows["flags"] >> 1)[:, None]
    amount = np.where(dims, rows["shape"], 1).astype(np.int64).prod(1)
    amount = np.where(np.isin(kind, MAY_DIFFER), 0, amount)
    kind = np.where(np.isin(kind, MESSAGES), MESSAGES[0], kind)
    return (amount * len(KINDS) + kind) * len(DTYPES) + rows["dtype"]


def sides(launches: list[Launch], others: Sequence[Launch] = ()) -> list[tuple[int, list[Launch]]]:
    """Ranks that brought the same together, the most first, each with how many they are; ``others`` count with them."""
    found: dict[tuple[str, str, tuple[int, ...]], list[Launch]] = defaultdict(list)
    for launch in launches:
        found[launch.kind, launch.dtype, launch.shape].append(launch)
    more = Counter((each.kind, each.dtype, each.shape) for each in others)
    counted = [(len(side) + more[brought], side) for brought, side in found.items()]
    return sorted(counted, key=lambda each: each[0], reverse=True)
