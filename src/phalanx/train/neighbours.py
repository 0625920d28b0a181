"""Copies at the neighbour: each host's states are also kept in the memory of the next host, in a ring.

Not where each host has the whole state anyway: replicas have nothing to learn from each other, and a link that is too
slow for gradients would carry states.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from phalanx.checkpoint.slot import Slot
from phalanx.events import say
from phalanx.layout import Layout
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.mesh import AXES, Grid
from phalanx.parallel.communication.traffic import Traffic
from phalanx.train.engine import Engine


def has_all_on_every_host(layout: Layout, hosts: Sequence[int]) -> bool:
    """Whether the ranks of any one host have all weights and moments: each other host is a replica, or several."""
    there: dict[int, set[tuple[int, ...]]] = {}
    for rank, host in enumerate(hosts):
        at = Grid(layout, rank).coordinates
        there.setdefault(host, set()).add(tuple(at[axis] for axis in AXES if axis != "dp"))
    return all(len(found) == layout.world // layout.dp for found in there.values())


def guests_of(hosts: Sequence[int], rank: int) -> list[int]:
    """The ranks of the host before, whose copies this rank takes in."""
    members = _by_host(hosts)
    here = members[hosts[rank]]
    return members[(hosts[rank] - 1) % len(members)][here.index(rank) :: len(here)]


def holder_of(hosts: Sequence[int], rank: int) -> int:
    """The rank on the next host that takes in this rank's copies."""
    members = _by_host(hosts)
    there = members[(hosts[rank] + 1) % len(members)]
    return there[members[hosts[rank]].index(rank) % len(there)]


def _by_host(hosts: Sequence[int]) -> list[list[int]]:
    members: list[list[int]] = [[] for _ in range(max(hosts) + 1)]
    for rank, host in enumerate(hosts):
        members[host].append(rank)
    return members


def pairs(hosts: Sequence[int]) -> list[tuple[int, int]]:
    """Every rank and the one that takes in its copies, in the order in which they are connected.

    Those of hosts of even number come first, then those of odd ones: no rank waits for a connection that waits for
    another one, on and on around the ring.
    """
    members = _by_host(hosts)
    turns: tuple[list[tuple[int, int]], ...] = [], [], []
    for host, here in enumerate(members):
        there = members[(host + 1) % len(members)]
        closes_odd_ring = host == len(members) - 1 and host % 2 == 0
        turns[2 if closes_odd_ring else host % 2].extend((r, there[i % len(there)]) for i, r in enumerate(here))
    return [pair for turn in turns for pair in turn]


class Neighbours:
    """Hands this rank's copies to the next host, and takes in those of the host before."""

    def __init__(self, engine: Engine, guests: Sequence[Sequence[Slot]]) -> None:
        """``guests``: slots for each rank whose copies are taken in. All ranks must make one."""
        hosts, rank = engine.environment.hosts, engine.environment.rank
        self.to, self.origins = holder_of(hosts, rank), guests_of(hosts, rank)
        self.guests = guests
        # groups of their own, in the host's memory: they speak while steps go on. Each has two ranks, since gloo
        # connects all members of a group; and every rank names all of them in one order, since torch numbers them
        self._groups: dict[frozenset[int], Communicator] = {}
        behind = Traffic()  # of a thread of its own: not counted among what steps send
        for pair in dict.fromkeys(map(frozenset, pairs(hosts))):
            group = dist.new_group(sorted(pair), backend="gloo", timeout=engine.timeout, group_desc="neighbours")
            if rank in pair:
                self._groups[pair] = Communicator(group, behind)
        self.rank = rank
        self._cut_off = False
        """The next host did not answer, and is not asked again."""

    def _with(self, other: int) -> Communicator:
        return self._groups[frozenset([self.rank, other])]

    def hand_on(self, slot: Slot) -> None:
        """Exchange copies; where that fails once, no more."""
        try:
            if not self._cut_off:
                self.exchange(slot)
        except RuntimeError as error:
            self._cut_off = True
            say(f"   note  no more copies at the next host: {str(error).splitlines()[0]}")

    def exchange(self, slot: Slot) -> None:
        """Both ways at once: a whole copy leaves, and others come."""
        own = slot.summary()
        pending = [self._with(self.to).send(own, self.to)]
        arriving = []
        for origin, slots in zip(self.origins, self.guests, strict=False):
            coming = torch.zeros_like(own)
            self._with(origin).receive(coming, origin).wait()
            guest = min(slots, key=lambda slot: slot.step() or -1)
            arriving.append((origin, guest, coming, guest.room(coming)))
        pending.append(self._with(self.to).send(slot.content(), self.to))
        for origin, guest, coming, room in arriving:
            self._with(origin).receive(room, origin).wait()
            guest.admit(coming)
        for work in pending:
            work.wait()

    def close(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups.clear()
