"""Copies at the neighbour: each host's states are also kept in the memory of the next host, in a ring."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from phalanx.checkpoint.slot import Slot
from phalanx.parallel import collectives
from phalanx.train.engine import Engine


def guests_of(hosts: Sequence[int], rank: int) -> list[int]:
    """The ranks of the host before, whose copies this rank takes in."""
    return [other for other in range(len(hosts)) if keeper_of(hosts, other) == rank]


def keeper_of(hosts: Sequence[int], rank: int) -> int:
    """The rank on the next host that takes in this rank's copies."""
    members = [[r for r, host in enumerate(hosts) if host == h] for h in range(max(hosts) + 1)]
    there = members[(hosts[rank] + 1) % len(members)]
    return there[members[hosts[rank]].index(rank) % len(there)]


class Neighbours:
    """Hands this rank's copies to the next host, and takes in those of the host before."""

    def __init__(self, engine: Engine, guests: Sequence[Sequence[Slot]]) -> None:
        """``guests``: slots for each rank whose copies are taken in. All ranks must make one."""
        hosts, rank = engine.environment.hosts, engine.environment.rank
        self.to, self.origins = keeper_of(hosts, rank), guests_of(hosts, rank)
        self.guests = guests
        # a group of its own, in the host's memory: it speaks while steps go on
        self.group = dist.new_group(backend="gloo", timeout=engine.timeout, group_desc=collectives.BEHIND)

    def exchange(self, slot: Slot) -> None:
        """Both ways at once: a whole copy leaves, and others come."""
        own = slot.summary()
        pending = [collectives.send(own, self.group, self.to)]
        arriving = []
        for origin, slots in zip(self.origins, self.guests, strict=False):
            coming = torch.zeros_like(own)
            collectives.receive(coming, self.group, origin).wait()
            guest = min(slots, key=lambda slot: slot.step() or -1)
            arriving.append((origin, guest, coming, guest.room(coming)))
        pending.append(collectives.send(slot.content(), self.group, self.to))
        for origin, guest, coming, room in arriving:
            collectives.receive(room, self.group, origin).wait()
            guest.admit(coming)
        for work in pending:
            work.wait()

    def close(self) -> None:
        dist.destroy_process_group(self.group)
