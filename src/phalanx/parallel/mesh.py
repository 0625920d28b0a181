"""The mesh: ranks in a grid with one axis a parallelism, and the process groups along its axes.

Groups are made here and nowhere else, each with its axis as its name and the run's timeout: a group that torch makes
for a mesh would wait 30 minutes and tell nobody which axis it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist

from phalanx.layout import Layout
from phalanx.parallel import collectives
from phalanx.parallel.schedules import CHUNKS

AXES = ("pp", "dp", "fsdp", "cp", "tp")
"""From the outermost, whose members are far apart, to the innermost, who are neighbours."""
BATCH = ("dp", "fsdp")
"""The axes along which samples differ."""
SHARD = ("fsdp", "cp")
"""The axes over which one copy of the training state is cut; ranks of ``cp`` have the same samples and share it too."""
EXPERTS = ("ep",)
EXPERT_SHARD = ("fsdp", "cp", "without ep")
"""Within ``fsdp x cp``, neighbours hold different experts, and those ``ep`` apart share one copy of the same."""
GROUPS = (("dp",), SHARD, ("cp",), ("tp",), ("pp",), BATCH, AXES, EXPERTS, EXPERT_SHARD)


class Mesh:
    """Where this rank stands on each axis, and whom it speaks to along it."""

    def __init__(self, layout: Layout, rank: int, timeout: timedelta) -> None:
        self.degrees = {axis: getattr(layout, axis) for axis in AXES}
        self.ep = layout.ep
        self.rank = rank
        self.coordinates = dict(zip(AXES, self._place(rank), strict=True))
        self._groups: dict[tuple[str, ...], dist.ProcessGroup | None] = {}
        made: dict[tuple[int, ...], dict[str, dist.ProcessGroup]] = {}
        for axes in GROUPS:
            called = self._called(axes)
            for members in self._partition(axes):  # every rank makes every group, in one order: torch numbers them
                known = made.setdefault(members, {})
                if len(members) > 1 and called not in known and not (known and axes in (BATCH, AXES)):
                    known[called] = dist.new_group(list(members), timeout=timeout, group_desc=called)
            own = made[self.members(axes)]
            self._groups[axes] = own.get(called) or next(iter(own.values()), None)
        self._made = [group for members, known in made.items() if rank in members for group in known.values()]
        self._lanes: dict[tuple[str, int], dist.ProcessGroup] = {}
        rings = CHUNKS.get(layout.schedule, 1) > 1
        for members in self._partition(("pp",)):
            for way, step in (("forward", 1), ("backward", -1)):
                for to, receiver in enumerate(members if layout.pp > 1 else ()):
                    if rings or 0 <= to - step < layout.pp:
                        pair = [members[(to - step) % layout.pp], receiver]
                        group = dist.new_group(pair, timeout=timeout, group_desc=f"pp {way}")
                        if rank in pair:
                            self._lanes[way, to] = group
        self._made += self._lanes.values()
        if self._lanes and dist.get_backend() == "nccl":
            self._connect()

    def _connect(self) -> None:
        """Send one number along each lane, on every rank in the same order.

        NCCL connects two ranks at their first message, and holds both up until the other is there: in a step, where
        each may be at another lane, for ever.
        """
        for (_, to), lane in self._lanes.items():
            number = torch.zeros(1, device="cuda")
            receiver = self.members(("pp",))[to]
            other = next(rank for rank in dist.get_process_group_ranks(lane) if rank != self.rank)
            pending = (collectives.receive if self.rank == receiver else collectives.send)(number, lane, other)
            pending.wait()

    def _called(self, axes: tuple[str, ...]) -> str:
        """What a group along these axes is called in logs and errors: by those that matter."""
        if axes in (SHARD, EXPERT_SHARD):
            shards = "fsdpxcp" if self.degrees["cp"] > 1 else "fsdp"
            return shards if axes == SHARD or self.ep == 1 else f"{shards} of experts"
        return "world" if axes == AXES else "x".join(a for a in axes if self.degrees.get(a, 2) > 1)

    def _partition(self, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
        """All ranks, in sets that differ along these axes alone."""
        world = range(self.size(*AXES))
        return list(dict.fromkeys(self._along(axes, self._place(rank)) for rank in world))

    def _place(self, rank: int) -> tuple[int, ...]:
        place = []
        for axis in reversed(AXES):
            rank, index = divmod(rank, self.degrees[axis])
            place.append(index)
        return tuple(reversed(place))

    def members(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that differ from this one along these axes alone, itself among them."""
        return self._along(axes, tuple(self.coordinates[axis] for axis in AXES))

    def _along(self, axes: tuple[str, ...], place: tuple[int, ...]) -> tuple[int, ...]:
        if axes in (EXPERTS, EXPERT_SHARD):
            sharing = self._along(SHARD, place)
            index = sharing.index(self._number(place))
            start = index - index % self.ep
            return sharing[start : start + self.ep] if axes == EXPERTS else sharing[index % self.ep :: self.ep]
        spans = [range(self.degrees[a]) if a in axes else [at] for a, at in zip(AXES, place, strict=True)]
        return tuple(self._number(found) for found in product(*spans))

    def among(self, **indices: Sequence[int] | None) -> list[int]:
        """The ranks at these indices of some axes (None: at any) and at this one's of the others."""
        spans = [
            (range(self.degrees[axis]) if indices[axis] is None else indices[axis] or ())
            if axis in indices
            else [self.coordinates[axis]]
            for axis in AXES
        ]
        return sorted(self._number(place) for place in product(*spans))

    def _number(self, place: tuple[int, ...]) -> int:
        number = 0
        for axis, index in zip(AXES, place, strict=True):
            number = number * self.degrees[axis] + index
        return number

    def size(self, *axes: str) -> int:
        return len(self.members(axes)) if axes in (EXPERTS, EXPERT_SHARD) else math.prod(self.degrees[a] for a in axes)

    def index(self, *axes: str) -> int:
        """This rank's place among the members of these axes."""
        return self.members(axes).index(self.rank)

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The group along these axes, or None where this rank is alone on them."""
        return self._groups[axes]

    def lane(self, way: str, to: int) -> dist.ProcessGroup:
        """The group for messages ``forward`` or ``backward`` to a neighbour along ``pp``."""
        return self._lanes[way, to]

    @property
    def world(self) -> dist.ProcessGroup | None:
        return self._groups[AXES]

    def close(self) -> None:
        """Take the groups apart."""
        for group in self._made:
            dist.destroy_process_group(group)
        self._made.clear()
        self._groups.clear()
        self._lanes.clear()
