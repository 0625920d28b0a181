"""Sums over ranks of several hosts: inside each host first, so that no more travels between hosts than must.

Every rank sums a part of the numbers over its host, then that part with those who have the same one on other hosts, and
gives it to its host. A rank sends as many bytes as in a ring over all, and of these fewer to other hosts: of S bytes, H
hosts with k ranks each send 2 (H-1)/H S from a host instead of 2 (Hk-1)/(Hk) S by a ring, or k times that where all
give each other their parts. NCCL does so by itself; this is for gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.communication.exact import fold
from phalanx.parallel.communication.memory import Buffers
from phalanx.parallel.communication.peers import Messages, Peers
from phalanx.parallel.communication.pending import Pending


def on_hosts(hosts: Sequence[int]) -> list[list[int]]:
    """The ranks of each host, by place in a group; ``hosts``: of each of them, neighbours on the same."""
    return [[place for place, own in enumerate(hosts) if own == host] for host in sorted(set(hosts))]


def in_two_ways(hosts: Sequence[int]) -> bool:
    """Whether sums go inside of hosts first: there are several, with several ranks each, as many on each."""
    sizes = {len(ranks) for ranks in on_hosts(hosts)}
    return len(set(hosts)) > 1 and len(sizes) == 1 and max(sizes) > 1


class HostSums:
    """Of a group whose ranks are on several hosts, as many on each; with one on each, no sum comes first."""

    def __init__(self, peers: Peers, hosts: Sequence[int]) -> None:
        every = on_hosts(hosts)
        near = next(ranks for ranks in every if peers.rank in ranks)
        place = near.index(peers.rank)
        self._near, self._far = peers.among(near), peers.among([ranks[place] for ranks in every])
        self._buffers = Buffers(torch.device("cpu"))
        self.least = peers.size
        """Numbers, so that each rank has a part."""
        self.by_tree = len(near) & (len(near) - 1) == 0
        """Whether sums have the bits of the tree over all ranks: those of a host are a node of it."""

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Sum over the ranks, in place; every rank gets the same bits. Each hop is launched by the one before it.

        All that will come is expected now: others write into parts of this rank's numbers once they have had these.
        """
        near, far, buffers = self._near, self._far, self._buffers
        parts = tensor.view(-1).tensor_split(near.size)
        own = parts[near.rank]
        pieces = own.tensor_split(far.size)
        piece = pieces[far.rank]
        alone = near.size == 1
        rows = own if alone else buffers.take(near.size, len(own), dtype=tensor.dtype)
        sums = buffers.take(far.size, len(piece), dtype=tensor.dtype)
        give_parts, give_pieces = _expected(near, rows), _expected(far, sums)
        give_sum, give_all = _expected(far, pieces), _expected(near, parts)

        def across() -> Pending:
            if not alone:
                rows[near.rank].copy_(own)
                fold(rows, own)
                buffers.give(rows)
            return Pending(give_pieces(pieces), back)

        def back() -> Pending:
            sums[far.rank].copy_(piece)
            fold(sums, piece)
            buffers.give(sums)
            return Pending(give_sum([piece] * far.size), inside)

        def inside() -> Pending:
            return Pending(give_all([own] * near.size))

        return Pending(give_parts(parts), across)


def _expected(peers: Peers, messages: Messages) -> Callable[[Messages], list[dist.Work]]:
    """One is to come from each; what sends theirs, on any thread, and gives what is to be waited for."""
    number = peers.number()
    coming = peers.ready(messages, number)
    return lambda own: [*coming, *peers.send(own, number)]
