"""Messages between the ranks of a gloo group, to all at once and both ways at once.

gloo sends a message once its receiver has said that it is ready, and says so on the connection that its own messages
take: behind one that is under way, and large, the word comes when that is through. Then a link carries one direction
after the other. gloo's own collectives do so (54 of 100 Mbit/s each way for 2 MB between 2 hosts). Here every rank says
what it is ready for before it sends anything (96 of 100). Where ranks are far apart (`connections`), a large message
goes in parts, over several connections at once.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import Tensor

Messages = Tensor | Sequence[Tensor]
"""One a rank; of any sizes, if a list."""
LEAST_PART = 1 << 18
"""Bytes: a message is there when its last part is, so smaller ones gain nothing (2 MB in four messages, at 50 ms)."""


class Peers:
    """The others of a group. Messages are told apart by a number, so threads may send at the same time."""

    def __init__(self, group: dist.ProcessGroup, hosts: Sequence[int] = ()) -> None:
        """``hosts``: of each rank, where that is known."""
        self.rank, self.size = group.rank(), group.size()
        self._groups = [group]
        """Each has one connection to every rank. Those `among` these have the same list."""
        self._places: Sequence[int] = range(self.size)
        """In the group, of each rank."""
        self._elsewhere = [bool(hosts) and hosts[place] != hosts[self.rank] for place in self._places]
        """Of each place, whether it is on another host."""
        self._numbers = itertools.count()

    def connect(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Further groups of the same ranks, over which what is large goes to other hosts, too.

        All ranks must do so, while nothing is under way. They are taken apart by `close`.
        """
        self._groups += groups

    @property
    def connections(self) -> int:
        """To each rank of another host."""
        return len(self._groups)

    def close(self) -> None:
        """Take the further groups apart."""
        while len(self._groups) > 1:
            dist.destroy_process_group(self._groups.pop())

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
            for group, part in self._parts(rows[rank], self._places[rank])
            if (work := dist.irecv(part, group=group, group_src=self._places[rank], tag=number)) is not None
        ]

    def send(self, rows: Messages, number: int) -> list[dist.Work]:
        """Row r to rank r."""
        return [
            work
            for rank in self._others(1)
            for group, part in self._parts(rows[rank], self._places[rank])
            if (work := dist.isend(part, group=group, group_dst=self._places[rank], tag=number)) is not None
        ]

    def expect(self, rows: Tensor, number: int | None = None) -> Expected:
        """Say now that this rank is ready for an exchange: one whose number it has, or else a new one."""
        return Expected(self, rows, self.number() if number is None else number)

    def _parts(self, message: Tensor, place: int) -> Iterable[tuple[dist.ProcessGroup, Tensor]]:
        """What of a message goes over which connection: the same to who sends it and who receives it."""
        many = min(len(self._groups), message.nbytes // LEAST_PART) if self._elsewhere[place] else 1
        if many < 2:
            return [(self._groups[0], message)]
        return zip(self._groups, message.view(-1).tensor_split(many), strict=False)

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
