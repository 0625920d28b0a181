"""The mesh: ranks in a grid with one axis a parallelism, and the process groups along its axes.

The groups that steps speak along are made here and nowhere else, each with its axis as its name and the run's timeout:
a group that torch makes for a mesh would wait 30 minutes and tell nobody which axis it was. A rank makes the groups
that it is in and no others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist

from phalanx.layout import Layout
from phalanx.parallel.communication import connections, links
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.operators import forget, known
from phalanx.parallel.communication.traffic import Traffic
from phalanx.parallel.torch_private import default_store, new_group

AXES = ("pp", "dp", "fsdp", "cp", "tp")
"""From the outermost, whose members are far apart, to the innermost, who are neighbours."""
BATCH = ("dp", "fsdp")
"""The axes along which samples differ."""
SAME_SAMPLES = ("cp", "tp")
"""The axes whose ranks have the same samples; ``pp``'s do too, and only its last stage has their loss."""
SHARD = ("fsdp", "cp")
"""The axes over which one copy of the training state is cut; ranks of ``cp`` have the same samples and share it too."""
EXPERTS = ("ep",)
EXPERT_SHARD = ("fsdp", "cp", "without ep")
"""Within ``fsdp x cp``, neighbours hold different experts, and those ``ep`` apart share one copy of the same."""
GROUPS = (("dp",), SHARD, ("cp",), ("tp",), ("pp",), BATCH, AXES, EXPERTS, EXPERT_SHARD)
SMALL = (("pp",), BATCH, AXES, EXPERTS)
"""Groups along which little is said (batches of losses that need them whole), or by gloo's own collectives alone."""


@dataclass(frozen=True)
class Members:
    """The ranks of one process group."""

    ranks: tuple[int, ...]
    called: str
    """What it is called in logs and errors."""
    name: str
    """Told from every other group of the mesh by it."""


class Grid:
    """Where one rank stands on each axis, and whom it shares groups with: arithmetic, without a process group."""

    def __init__(self, layout: Layout, rank: int) -> None:
        """A rank beyond the layout's is one of another site, where there are several of this layout."""
        self.order = AXES if layout.local is None else ("dp", *(axis for axis in AXES if axis != "dp"))
        """From the outermost: sites are further apart than stages."""
        self.degrees = {axis: getattr(layout, axis) for axis in AXES}
        self.ep, self.rank, self.first = layout.ep, rank, rank - rank % layout.world
        self.rings = layout.stages > layout.pp
        self.coordinates: dict[str, int] = {}
        for axis in reversed(self.order):
            rank, self.coordinates[axis] = divmod(rank, self.degrees[axis])
        self._strides = {
            axis: math.prod(self.degrees[after] for after in self.order[place + 1 :])
            for place, axis in enumerate(self.order)
        }
        self._members: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._all = "world"
        """What all of its ranks are called."""

    def members(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that differ from this one along these axes alone, itself among them."""
        if axes not in self._members:
            self._members[axes] = self._along(axes)
        return self._members[axes]

    def _along(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        if axes in (EXPERTS, EXPERT_SHARD):
            sharing, index = self.members(SHARD), self.index(*SHARD)
            start = index - index % self.ep
            return sharing[start : start + self.ep] if axes == EXPERTS else sharing[index % self.ep :: self.ep]
        return tuple(self.among(**dict.fromkeys(axes)))

    def among(self, **indices: Sequence[int] | None) -> list[int]:
        """The ranks at these indices of some axes (None: at any) and at this one's of the others."""
        found = [self.first]
        for axis in self.order:
            at: Sequence[int] = [self.coordinates[axis]]
            if axis in indices:
                chosen = indices[axis]
                at = range(self.degrees[axis]) if chosen is None else chosen
            found = [number + index * self._strides[axis] for number, index in product(found, at)]
        return sorted(found)

    def size(self, *axes: str) -> int:
        if axes in (EXPERTS, EXPERT_SHARD):
            return self.ep if axes == EXPERTS else self.size(*SHARD) // self.ep
        return math.prod(self.degrees[axis] for axis in axes)

    def index(self, *axes: str) -> int:
        """This rank's place among the members of these axes."""
        if axes in (EXPERTS, EXPERT_SHARD):
            return divmod(self.index(*SHARD), self.ep)[axes == EXPERTS]
        place = 0
        for axis in self.order:
            if axis in axes:
                place = place * self.degrees[axis] + self.coordinates[axis]
        return place

    @property
    def counts_samples(self) -> bool:
        """Whether this is the first of the ranks that have its samples, so that each sample counts once."""
        return self.index(*SAME_SAMPLES) == 0

    def groups(self) -> dict[tuple[str, ...], Members]:
        """By axes: the group along them, where this rank is not alone on them; the same for axes that need no other.

        In the order in which they are made. It is one order of all groups of all ranks, so whoever waits for the others
        at the first that is not made waits for ranks that are on their way to it.
        """
        found: dict[tuple[str, ...], Members] = {}
        for number, axes in enumerate(GROUPS):
            ranks, called = self.members(axes), self._called(axes)
            alike = [group for group in found.values() if group.ranks == ranks]
            fits = [group for group in alike if group.called == called or axes in (BATCH, AXES)]
            if len(ranks) > 1:
                found[axes] = fits[0] if fits else Members(ranks, called, f"{number} of {ranks[0]}")
        return found

    def lanes(self) -> dict[tuple[str, int], Members]:
        """By way and receiver: this rank's groups of two for messages along ``pp``, in one order of all ranks."""
        ranks = self.members(("pp",))
        found = {}
        for to in sorted(range(len(ranks) if len(ranks) > 1 else 0), key=lambda to: (to % 2, to)):
            for way, step in (("forward", 1), ("backward", -1)):
                pair = (ranks[(to - step) % len(ranks)], ranks[to])
                if self.rank in pair and (self.rings or 0 <= to - step < len(ranks)):
                    found[way, to] = Members(tuple(sorted(pair)), f"pp {way}", f"{way} to {ranks[to]}")
        return found

    def _called(self, axes: tuple[str, ...]) -> str:
        """What a group along these axes is called in logs and errors: by those that matter."""
        if axes in (SHARD, EXPERT_SHARD):
            shards = "fsdpxcp" if self.degrees["cp"] > 1 else "fsdp"
            return shards if axes == SHARD or self.ep == 1 else f"{shards} of experts"
        return self._all if axes == AXES else "x".join(a for a in axes if self.degrees.get(a, 2) > 1)


class Mesh(Grid):
    """A rank's place in the grid, and a communicator along each axis."""

    def __init__(
        self, layout: Layout, rank: int, timeout: timedelta, traffic: Traffic | None = None, within: Mesh | None = None,
        hosts: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """``traffic``: where what is said along all axes is counted.

        ``within``: of all sites, where this is the mesh of one: groups that are the same are shared.
        ``hosts``: on which each rank is, where all ranks know that alike.
        """
        super().__init__(layout, rank)
        self.hosts = hosts
        self._all = "world" if within is None else "site"
        self.traffic, self.everybody = traffic or Traffic(), within or self
        """All ranks, of this site and of others."""
        self._sites: list[Mesh] = []
        shared: dict[Members, Communicator] = {} if within is None else within._made
        wanted, lanes = self.groups(), self.lanes()
        self._number = default_store().add(f"meshes of rank {rank}", 1) if wanted else 0  # in this world, so far
        nccl = bool(wanted) and dist.get_backend() == "nccl"
        self._device = device = torch.device("cuda", torch.cuda.current_device()) if nccl else None
        self._timeout = timeout
        every = dict.fromkeys([*wanted.values(), *lanes.values()])
        self._made: dict[Members, Communicator] = {g: self._make(g) for g in every if g not in shared}
        self._groups: dict[tuple[str, ...], Communicator] = {
            axes: (self._made | shared)[wanted[axes]] if axes in wanted else self.alone(*axes) for axes in GROUPS
        }
        self._lanes = {lane: (self._made | shared)[group] for lane, group in lanes.items()}
        large = {group for axes, group in wanted.items() if axes not in SMALL}
        between = [group for group in self._made if group in large and self._connections(group) > 1]
        self.round_trip: float = self._round_trip(between) if within is None else within.round_trip
        """Seconds, the longest between hosts along any group that would take several connections; 0: there is none."""
        self.connections = 1
        """To each rank of another host, at most."""
        if self.round_trip >= connections.FAR:
            for group in between:
                self._connect_more(group)
        if device is not None and within is None:
            self._connect(device)

    def _make(self, group: Members) -> Communicator:
        return known(Communicator(self._new_group(group), self.traffic, hosts=self._hosts_of(group)))

    def _new_group(self, group: Members, more: str = "") -> dist.ProcessGroup:
        name = f"mesh {self._number}, {group.name}{more}"
        return new_group(group.ranks, self.rank, name, self._timeout, group.called, self._device)

    def _hosts_of(self, group: Members) -> Sequence[int]:
        return [self.hosts[rank] for rank in group.ranks] if self.hosts else ()

    def _connections(self, group: Members) -> int:
        """Between two of its ranks, were their hosts far."""
        return connections.at_most(self._hosts_of(group), self.hosts) if self._made[group].expects else 1

    def _round_trip(self, groups: Sequence[Members]) -> float:
        """Measured along these: the same on all ranks."""
        if len(set(self.hosts)) < 2 or not self.world.expects:
            return 0.0
        found = [links.round_trip(self._made[group], torch.device("cpu")) for group in groups]
        longest = torch.tensor([max(found, default=0.0)], dtype=torch.float64)
        self.world.all_reduce_max(longest)
        return float(longest)

    def _connect_more(self, group: Members) -> None:
        """All of its members must do so."""
        many = self._connections(group)
        self.connections = max(self.connections, many)
        self._made[group].connect([self._new_group(group, f", connection {n}") for n in range(2, many + 1)])

    def alone(self, *axes: str) -> Communicator:
        """As along axes that have one rank."""
        return Communicator(None, self.traffic, self._called(axes))

    def _connect(self, device: torch.device) -> None:
        """Send one number along each lane, on every rank in the order of lanes.

        NCCL connects two ranks at their first message, and holds both up until the other is there: in a step, where
        each may be at another lane, for ever.
        """
        for (way, to), lane in self._lanes.items():
            number, receiver = torch.zeros(1, device=device), self.members(("pp",))[to]
            sender = next(rank for rank in self.lanes()[way, to].ranks if rank != receiver)
            if self.rank == receiver:
                lane.receive(number, sender).wait()
            else:
                lane.send(number, receiver).wait()

    def site(self, layout: Layout) -> Mesh:
        """Of the ranks that make a step together: all, or this rank's site. All ranks must ask for it."""
        if layout.local is None:
            return self
        self._sites.append(Mesh(layout.site, self.rank, self._timeout, self.traffic, self, self.hosts))
        return self._sites[-1]

    def group(self, *axes: str) -> Communicator:
        """The ranks along these axes."""
        return self._groups[axes]

    def joint(self, *axes: str) -> Communicator:
        """The ranks along axes that most runs do not speak along together, made where there is none of them.

        All of its members must ask for it at the same time.
        """
        ranks = self.members(axes)
        if len(ranks) == 1:
            return self.alone(*axes)
        for group, made in (self.everybody._made | self._made).items():
            if group.ranks == ranks:
                return made
        group = Members(ranks, self._called(axes), f"{'x'.join(axes)} of {ranks[0]}")
        self._made[group] = self._make(group)
        return self._made[group]

    def lane(self, way: str, to: int) -> Communicator:
        """For messages ``forward`` or ``backward`` to a neighbour along ``pp``."""
        return self._lanes[way, to]

    @property
    def world(self) -> Communicator:
        return self._groups[AXES]

    def close(self) -> None:
        """Take the process groups apart."""
        for site in self._sites:
            site.close()
        for communicator in self._made.values():
            forget(communicator)
            communicator.close()
