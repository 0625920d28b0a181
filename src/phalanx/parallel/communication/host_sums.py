"""Collectives over ranks of several hosts: inside each host and between hosts, so that little travels between them.

All-reduce: every rank sums a part of the numbers over its host, then that part with those who have the same one on
other hosts, and gives it to its host. A rank sends as many bytes as in a ring over all, and of these fewer to other
hosts: of S bytes, H hosts with k ranks each send 2 (H-1)/H S from a host instead of 2 (Hk-1)/(Hk) S by a ring, or k
times that where all give each other their parts. All-gather and reduce-scatter are halves of that: of what leaves a
host where every rank speaks to every other, a k-th does. NCCL does so by itself; this is for gloo.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.communication.background import InBackground
from phalanx.parallel.communication.exact import fold
from phalanx.parallel.communication.memory import Buffers
from phalanx.parallel.communication.peers import Messages, Peers
from phalanx.parallel.communication.pending import Pending

AT_ONCE = 3
"""Sums that take memory at the same time: each `1 + 1/k` times what it sums, with `k` ranks a host."""


def on_hosts(hosts: Sequence[int]) -> list[list[int]]:
    """The ranks of each host, by place in a group; ``hosts``: of each of them."""
    return [[place for place, own in enumerate(hosts) if own == host] for host in sorted(set(hosts))]


def in_two_ways(hosts: Sequence[int]) -> bool:
    """Whether sums go inside of hosts first: there are several, with several ranks each, as many on each."""
    sizes = {len(ranks) for ranks in on_hosts(hosts)}
    return len(set(hosts)) > 1 and len(sizes) == 1 and max(sizes) > 1


class HostSums:
    """Of a group whose ranks are on several hosts, as many on each; with one on each, no sum comes first."""

    def __init__(self, peers: Peers, hosts: Sequence[int]) -> None:
        self._every = every = on_hosts(hosts)
        near = next(ranks for ranks in every if peers.rank in ranks)
        place = near.index(peers.rank)
        self._near, self._far = peers.among(near), peers.among([ranks[place] for ranks in every])
        self._buffers = Buffers(torch.device("cpu"))
        self._under_way: deque[InBackground] = deque(maxlen=AT_ONCE)
        self.least = peers.size
        """Numbers, so that each rank has a part."""
        self.by_tree = len(near) & (len(near) - 1) == 0 and list(hosts) == sorted(hosts)
        """Whether sums have the bits of the tree over all ranks: those of a host are a node of it."""

    def all_reduce(self, tensor: Tensor, carried_on: Callable[[Pending], InBackground]) -> Pending:
        """Sum over the ranks, in place; every rank gets the same bits. Each hop is launched by the one before it.

        ``carried_on``: what has threads do so. A sum begins when the last but `AT_ONCE` is over: each takes memory.
        """
        near, far = self._near, self._far
        numbers = [peers.number() for peers in (near, far, far, near)]
        before = self._under_way[0] if len(self._under_way) == AT_ONCE else None

        def begin() -> Pending:
            if before is not None:
                before.ended()
            return self._begun(tensor, numbers)

        at_once = before is None or before.over
        self._under_way.append(carried_on(begin() if at_once else Pending((), begin)))
        return self._under_way[-1]

    def _begun(self, tensor: Tensor, numbers: Sequence[int]) -> Pending:
        """All that will come is expected now: others write into parts of this rank's numbers once they had these."""
        near, far, buffers = self._near, self._far, self._buffers
        parts = tensor.view(-1).tensor_split(near.size)
        own = parts[near.rank]
        pieces = own.tensor_split(far.size)
        piece = pieces[far.rank]
        alone = near.size == 1
        first = 0 if alone else near.size * len(own)
        room = buffers.take(first + far.size * len(piece), dtype=tensor.dtype)  # one: two may be twice as large each
        rows = own if alone else room[:first].view(near.size, -1)
        sums = room[first:].view(far.size, -1)
        give_parts, give_pieces = _expected(near, rows, numbers[0]), _expected(far, sums, numbers[1])
        give_sum, give_all = _expected(far, pieces, numbers[2]), _expected(near, parts, numbers[3])

        def across() -> Pending:
            if not alone:
                rows[near.rank].copy_(own)
                fold(rows, own)
            return Pending(give_pieces(pieces), back)

        def back() -> Pending:
            sums[far.rank].copy_(piece)
            fold(sums, piece)
            buffers.give(room)
            return Pending(give_sum([piece] * far.size), inside)

        def inside() -> Pending:
            return Pending(give_all([own] * near.size))

        return Pending(give_parts(parts), across)

    def reserved_all_gather(self) -> Callable[[Tensor, Tensor], Pending]:
        """An `all_gather` that is launched later, on any thread. All ranks must ask for it in the same order."""
        return partial(self.all_gather, numbers=self._numbers())

    def all_gather(self, output: Tensor, part: Tensor, numbers: Sequence[int] = ()) -> Pending:
        """Everybody's parts, row r of ``output`` being rank r's. ``part`` may be a row of it."""
        launch = self.prepared_all_gather(output, numbers)
        own = output[self._every[self._far.rank][self._near.rank]]
        if own.data_ptr() != part.data_ptr():
            own.copy_(part)
        return launch()

    def prepared_all_gather(self, output: Tensor, numbers: Sequence[int] = ()) -> Callable[[], Pending]:
        """What launches an all-gather, on any thread, once this rank's own row is in ``output``.

        A row comes to the rank of the same place on each other host, which then gives it to its host. All that will
        come is expected now, and there where it is to be: no memory is needed but the output's.
        """
        near, far = self._near, self._far
        across, *inside = numbers or self._numbers()
        hosts = [[output[rank] for rank in ranks] for ranks in self._every]
        column = [rows[near.rank] for rows in hosts]
        own = column[far.rank]
        give_own = _expected(far, column, across)
        give_row = [_expected(near, rows, number) for rows, number in zip(hosts, inside, strict=True)]

        def launch() -> Pending:
            works = give_own([own] * far.size)
            here = give_row[far.rank]([own] * near.size)

            def pass_on() -> Pending:
                others = [host for host in range(far.size) if host != far.rank]
                return Pending([*here, *(w for host in others for w in give_row[host]([column[host]] * near.size))])

            return Pending(works, pass_on)

        return launch

    def _numbers(self) -> list[int]:
        """Of the exchanges of an all-gather: one between hosts, and one of each host's rows."""
        return [self._far.number(), *(self._near.number() for _ in self._every)]

    def reduce_scatter(self, output: Tensor, parts: Tensor, buffers: Buffers | None = None) -> Pending:
        """The sum over the ranks of this rank's row of ``parts``, which is ``[ranks, *output]``.

        A rank sums over its host what ranks of its place are to have, on any host, and sends each the sum. Takes a row
        a rank from ``buffers``, as an exchange among all does, and a row a host more.
        """
        near, far, buffers = self._near, self._far, buffers or self._buffers
        rows = buffers.take(near.size, far.size, *parts.shape[1:], dtype=parts.dtype)
        sums = buffers.take(far.size, *parts.shape[1:], dtype=parts.dtype)
        hosts = [[parts[rank] for rank in ranks] for ranks in self._every]
        give_rows = [_expected(near, rows[:, host]) for host in range(far.size)]
        give_sums = _expected(far, sums)

        def across() -> Pending:
            for host, theirs in enumerate(hosts):
                rows[near.rank, host].copy_(theirs[near.rank])
            own = fold(rows)
            sums[far.rank].copy_(own[far.rank])
            return Pending(give_sums(own), finish)

        def finish() -> None:
            fold(sums, output)
            buffers.give(rows)
            buffers.give(sums)

        return Pending([work for give, row in zip(give_rows, hosts, strict=True) for work in give(row)], across)


def _expected(peers: Peers, messages: Messages, number: int | None = None) -> Callable[[Messages], list[dist.Work]]:
    """One is to come from each; what sends theirs, on any thread, and gives what is to be waited for."""
    number = peers.number() if number is None else number
    coming = peers.ready(messages, number)
    return lambda own: [*coming, *peers.send(own, number)]
