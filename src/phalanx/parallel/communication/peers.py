"""Messages between the ranks of a gloo group, to all at once and both ways at once.

gloo sends a message once its receiver has said that it is ready, and says so on the connection that its own messages
take: behind one that is under way, and large, the word comes when that is through. Then a link carries one direction
after the other. gloo's own collectives do so (54 of 100 Mbit/s each way for 2 MB between 2 hosts). Here every rank says
what it is ready for before it sends anything (96 of 100).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

Messages = Tensor | Sequence[Tensor]
"""One a rank; of any sizes, if a list."""


class Peers:
    """The others of a group. Messages are told apart by a number, so threads may send at the same time."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.rank, self.size = group, group.rank(), group.size()
        self._places: Sequence[int] = range(self.size)
        """In the group, of each rank."""
        self._numbers = itertools.count()

    def among(self, ranks: Sequence[int]) -> Peers:
        """Some of them, this rank too, each with its place among these. Numbers stay those of all."""
        found = copy.copy(self)
        found._places, found.rank, found.size = ranks, ranks.index(self.rank), len(ranks)
        return found

    def number(self) -> int:
        """Of a new exchange. All ranks must ask in the same order."""
        return next(self._numbers) % ((1 << 31) - 1) + 1

    def ready(self, rows: Messages, number: int) -> list[dist.Work]:
        """Row r is to come from rank r."""
        return [
            work
            for rank in self._others(-1)
            if (work := dist.irecv(rows[rank], group=self._group, group_src=self._places[rank], tag=number)) is not None
        ]

    def send(self, rows: Messages, number: int) -> list[dist.Work]:
        """Row r to rank r."""
        return [
            work
            for rank in self._others(1)
            if (work := dist.isend(rows[rank], group=self._group, group_dst=self._places[rank], tag=number)) is not None
        ]

    def expect(self, rows: Tensor, number: int | None = None) -> Expected:
        """Say now that this rank is ready for an exchange: one whose number it has, or else a new one."""
        return Expected(self, rows, self.number() if number is None else number)

    def _others(self, way: int) -> list[int]:
        """From neighbours on, so that not all ranks begin with the same one."""
        return [(self.rank + way * step) % self.size for step in range(1, self.size)]


class Expected:
    """Rows that others may send as soon as they have them: the word that this rank is ready has passed by then.

    Without it a message takes a round trip, and with it half of one.
    """

    def __init__(self, peers: Peers, rows: Tensor, number: int) -> None:
        """``rows``: row r is to come from rank r."""
        self.rows, self._peers, self._number = rows, peers, number
        self._works = peers.ready(rows, number)

    def send(self, rows: Tensor) -> list[dist.Work]:
        """Row r to rank r. What is to be waited for: these, and those of the others. Any thread may do so."""
        return [*self._works, *self._peers.send(rows, self._number)]
