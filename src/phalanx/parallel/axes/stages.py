"""Stages: which blocks, and so which weights, each rank of ``pp`` has. Balanced by cost, not by count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from torch import nn

from phalanx.anatomy import Anatomy
from phalanx.errors import WrongUse
from phalanx.layout import CHUNKS


@dataclass(frozen=True)
class Stages:
    """A model cut into stages; stage s is rank ``s % ranks``'s."""

    ranks: int
    blocks: tuple[tuple[str, ...], ...]
    """By stage, in order."""
    places: Mapping[str, frozenset[int]]
    """By module that stands in a unit of the anatomy: the ranks that have it. The root is on all."""

    @property
    def last(self) -> int:
        return len(self.blocks) - 1

    def of(self, rank: int) -> range:
        """The stages of a rank."""
        return range(rank, len(self.blocks), self.ranks)

    def holders(self, name: str) -> list[int]:
        """The ranks that have a weight, a buffer or a module, by its name."""
        inside = [m for m in self.places if m and (name == m or name.startswith(m + "."))]
        return sorted(self.places[max(inside, key=len)] if inside else range(self.ranks))


def divide(model: nn.Module, anatomy: Anatomy, ranks: int, schedule: str) -> Stages:
    """Cut a model where its anatomy allows, the dearest stage as cheap as can be."""
    parts = ranks * CHUNKS.get(schedule, 1)
    how = f"pp={ranks}" if parts == ranks else f"pp={ranks},schedule={schedule}"
    if not anatomy.cuts:
        raise WrongUse(
            f"{how} needs a model whose blocks follow each other in one list, and none was found in "
            f"{type(model).__name__}. Name them in Task.anatomy, or use fsdp instead of pp."
        )
    pieces: list[list[str]] = []
    for block in anatomy.blocks:
        if block in anatomy.cuts or not pieces:
            pieces.append([])
        pieces[-1].append(block)
    if len(pieces) < parts:
        raise WrongUse(
            f"{how} makes {parts} stages, and {type(model).__name__} can be cut into {len(pieces)} at most "
            f"({', '.join(anatomy.cuts[:3])}, ...). Use pp={max(1, len(pieces) * ranks // parts)} or less."
        )
    costs = [float(sum(_cost(model.get_submodule(block)) for block in piece)) for piece in pieces]
    costs[0] += sum(_cost(model.get_submodule(name)) for name in anatomy.before)
    costs[-1] += sum(_cost(model.get_submodule(name)) for name in anatomy.after)
    stages = tuple(tuple(b for piece in pieces[start:stop] for b in piece) for start, stop in runs(costs, parts))
    places = {block: frozenset([index % ranks]) for index, blocks in enumerate(stages) for block in blocks}
    places |= dict.fromkeys(anatomy.before, frozenset([0])) | dict.fromkeys(anatomy.after, frozenset([ranks - 1]))
    for name in anatomy.before:
        if all(weight.ndim < 2 for weight in model.get_submodule(name).parameters()):
            del places[name]  # a norm may be used before the blocks or after them: all stages have it
    for unit in anatomy.units:
        if unit.place == "tied":
            everywhere = frozenset(range(ranks))
            places[unit.name] = frozenset().union(*(places.get(module, everywhere) for module in unit.modules))
    return Stages(ranks, stages, places)


def _cost(module: nn.Module) -> int:
    """Multiplications a token costs, about: the elements of matrices. Looking up an embedding is free."""
    return sum(
        weight.numel()
        for inner in module.modules()
        if not isinstance(inner, nn.Embedding)
        for weight in inner.parameters(recurse=False)
        if weight.ndim > 1
    )


def runs(costs: list[float], parts: int) -> Iterator[tuple[int, int]]:
    """Neighbours in so many runs, none empty, the dearest of them as cheap as can be."""

    @cache
    def best(start: int, left: int) -> tuple[float, int]:
        if left == 1:
            return sum(costs[start:]), len(costs)
        options = [
            (max(sum(costs[start:stop]), best(stop, left - 1)[0]), stop)
            for stop in range(start + 1, len(costs) - left + 2)
        ]
        return min(options)

    start = 0
    for left in range(parts, 0, -1):
        stop = best(start, left)[1]
        yield start, stop
        start = stop
