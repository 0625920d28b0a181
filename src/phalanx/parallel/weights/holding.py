"""Who holds a weight: which part of it ``tp`` has cut, which stages of ``pp`` have it; what follows for its gradient.

A weight that several ranks of ``tp`` or ``pp`` hold alike gets a part of its gradient on each: the parts are summed, in
one order, so that the holders go on alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from phalanx.parallel.axes.cuts import Cut
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.mesh import Mesh
from phalanx.parallel.weights.placement import Placement


class Holding:
    """The ranks that hold each weight of a model."""

    def __init__(self, placement: Placement, mesh: Mesh) -> None:
        self.placement, self.mesh = placement, mesh
        self.plan, self.stages = placement.plan, placement.stages
        self.shapes = {name: one.shape for name, one in placement.weights.items()}
        self._stage_ranks: dict[str, list[int]] = {}

    def stage_ranks(self, name: str) -> list[int]:
        """The ranks of ``pp`` that have a weight, a buffer or a module."""
        if name not in self._stage_ranks:  # asked for every weight in every step
            self._stage_ranks[name] = [0] if self.stages is None else self.stages.holders(name)
        return self._stage_ranks[name]

    def here(self, name: str) -> bool:
        """Whether this rank's stages have it."""
        return self.mesh.index("pp") in self.stage_ranks(name)

    def cut(self, name: str) -> Cut | None:
        return self.plan.cuts.get(name)

    def shape(self, name: str) -> torch.Size:
        """Of the part that this rank computes with."""
        return self.placement.weights[name].part(self.mesh)

    def index(self, name: str) -> int:
        """This rank's place along the axis that divides a weight."""
        return self.placement.weights[name].index(self.mesh)

    def part(self, name: str, whole: Tensor) -> Tensor:
        """What this rank computes with."""
        cut = self.cut(name)
        return cut.take(whole, self.index(name)) if cut else whole

    def alike(self, name: str) -> list[int]:
        """The ranks of ``tp`` that hold the same as this one."""
        return list(self.placement.weights[name].alike(self.mesh))

    def adding(self, name: str) -> list[int]:
        """The ranks of ``tp`` whose gradients add up: those that hold the same and each computed something else."""
        cut = self.cut(name)
        divided = cut is not None and cut.axis == "tp"
        return self.alike(name) if divided or name in self.plan.partial else [self.mesh.index("tp")]

    def counts(self, name: str) -> bool:
        """Whether this is the first of all ranks that hold the same rows, so that each counts once."""
        return (self.mesh.index("tp"), self.mesh.index("pp")) == (self.alike(name)[0], self.stage_ranks(name)[0])

    def complete(self, gradients: Sequence[tuple[str, Tensor]], like: Tensor) -> None:
        """Sum what several ranks have parts of, in place. All of them must call it, also those that have none."""
        tp, pp = self.mesh.group("tp"), self.mesh.group("pp")
        if not tp.alone:
            _sum_among([(part, self.adding(name)) for name, part in gradients], like, tp)
        if not pp.alone and any(len(self.stage_ranks(name)) > 1 for name in self.shapes):
            _sum_among([(part, self.stage_ranks(name)) for name, part in gradients], like, pp)

    def joined(self, parts: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Weights, or gradients of them, put together from what the ranks of ``tp`` or ``ep`` hold."""
        for name, part in parts:
            cut = self.cut(name)
            yield name, part if cut is None else self._whole(cut, self.shapes[name], part, self.mesh.group(cut.axis))

    @staticmethod
    def _whole(cut: Cut, shape: torch.Size, part: Tensor, group: Communicator) -> Tensor:
        shapes = [cut.shape(shape, rank) for rank in range(group.size)]
        every = part.new_zeros(group.size, max(shape.numel() for shape in shapes))
        every[group.rank, : part.numel()] = part.reshape(-1)
        group.all_gather(every, every[group.rank].clone()).wait()
        whole = part.new_empty(shape)
        for rank, own in enumerate(shapes):
            cut.put(every[rank, : own.numel()].view(own), whole, rank)
        return whole

    def from_stages(
        self,
        own: Iterator[tuple[str, Tensor]],
        order: Sequence[Sequence[str]],
        dtype: Callable[[str], torch.dtype],
        device: torch.device,
    ) -> Iterator[tuple[str, Tensor]]:
        """What all stages have, each weight once; ``order`` says by stage in which order it gives them."""
        group, index = self.mesh.group("pp"), self.mesh.index("pp")
        if group.alone:
            yield from own
            return
        for rank, names in enumerate(order):
            first = [name for name in names if self.stage_ranks(name)[0] == rank]
            given = (
                own
                if rank == index
                else ((name, torch.empty(self.shapes[name], dtype=dtype(name), device=device)) for name in first)
            )
            for name, tensor in given:
                if name in first:
                    tensor = tensor.contiguous()
                    group.broadcast(tensor, rank)
                    yield name, tensor


def _sum_among(parts: Sequence[tuple[Tensor, list[int]]], like: Tensor, group: Communicator) -> None:
    """Sum each part over the ranks that hold it, in the order of the ranks."""
    shared = [(part, holders) for part, holders in parts if len(holders) > 1]
    others = [rank for rank in range(group.size) if rank != group.rank]
    lists = [[part for part, holders in shared if rank in holders and rank in others] for rank in range(group.size)]
    sizes = [sum(part.numel() for part in given) for given in lists]
    flat = torch.cat([like.new_empty(0), *(part.reshape(-1) for given in lists for part in given)])
    received = group.all_to_all_rows(flat, sizes, sizes).split(sizes)
    offsets = [0] * group.size
    for part, holders in shared:
        total = torch.zeros_like(part)
        for rank in holders:
            if rank == group.rank:
                total += part
            else:
                start, offsets[rank] = offsets[rank], offsets[rank] + part.numel()
                total += received[rank][start : offsets[rank]].view_as(part)
        part.copy_(total)
