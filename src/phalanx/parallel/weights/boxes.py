"""Where a rank's shard lies in the whole weight, as boxes: the one map that checkpoints of any layout are read by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.adamw import Segment
from phalanx.parallel.axes.cuts import Cut
from phalanx.parallel.weights.weight import Rows, Weight


@dataclass(frozen=True)
class Box:
    """A part of a whole tensor: from ``offsets``, so many as ``sizes`` says along each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> Box:
        return cls((0,) * tensor.ndim, tuple(tensor.shape))

    def rows(self, start: int, stop: int) -> Box:
        """Some of its rows."""
        return Box((self.offsets[0] + start, *self.offsets[1:]), (stop - start, *self.sizes[1:]))

    def of(self, whole: Tensor) -> Tensor:
        """A view of what lies there."""
        for dim, (start, length) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            whole = whole.narrow(dim, start, length)
        return whole


class ShardBox(NamedTuple):
    """A box of the whole weight, and where it begins in a rank's shard."""

    box: Box
    dim: int
    start: int

    def view(self, shard: Tensor) -> Tensor:
        """Of a rank's rows of the weight, or of its moments: themselves, where the box is all of them."""
        if not self.box.sizes:
            return shard.view(())
        length = self.box.sizes[self.dim]
        return shard if length == shard.shape[self.dim] else shard.narrow(self.dim, self.start, length)


def boxes_of(rows: Weight | Rows, cut: Cut | None, index: int) -> Iterator[ShardBox]:
    """The boxes that a rank's rows of its part of a weight consist of.

    ``cut`` is how ``tp`` or ``ep`` has divided the weight, and ``index`` the rank's place there.
    """
    part, first, last = rows.shape, rows.first, rows.last
    if first == last or not part.numel():
        return
    if not part:
        yield ShardBox(Box((), ()), 0, 0)
        return
    rest, sizes = (0,) * (len(part) - 1), (last - first, *part[1:])
    if cut is None:
        yield ShardBox(Box((first, *rest), sizes), 0, 0)
        return
    local = 0  # where the next span begins in what this rank has of the cut dim
    for start, stop in cut.spans[index]:
        length = stop - start
        if cut.dim == 0:
            a, b = max(local, first), min(local + length, last)
            if a < b:
                yield ShardBox(Box((start + a - local, *rest), (b - a, *part[1:])), 0, a - first)
        elif length:
            offsets, own = [first, *rest], list(sizes)
            offsets[cut.dim], own[cut.dim] = start, length
            yield ShardBox(Box(tuple(offsets), tuple(own)), cut.dim, local)
        local += length


def boxes(rows: Weight | Rows, cut: Cut | None, index: int, shard: Tensor) -> list[tuple[Box, Tensor]]:
    """The boxes that ``shard``, a rank's rows of a weight or of its moments, consists of, each with its view."""
    return [(place.box, place.view(shard)) for place in boxes_of(rows, cut, index)]


def locate(weight: Weight, cut: Cut | None, index: int, shape: torch.Size) -> None:
    """Note on a weight's shard where it lies in a whole of ``shape``, for an optimizer that draws for each element."""
    marks = {"logical_boxes": tuple(boxes_of(weight, cut, index)), "logical_shape": shape}
    vars(weight.shard).update(marks)


def segments(size: Sequence[int], places: Iterable[ShardBox], shape: torch.Size) -> Iterator[Segment]:
    """What of a shard of this ``size`` lies together in memory, and where in the whole: boxes, or rows of them."""
    for place in places:
        box, dim = place.box, place.dim
        if not box.sizes:
            yield Segment(0, 1)
            continue
        steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        first = sum(offset * step for offset, step in zip(box.offsets, steps, strict=True))
        row = math.prod(size[dim + 1 :])
        if dim and box.sizes[dim] != size[dim]:
            for number in range(math.prod(size[:dim])):
                start = (number * size[dim] + place.start) * row
                yield Segment(start, box.sizes[dim] * row, first + number * shape[dim] * steps[dim])
            continue
        cut = max((axis for axis, length in enumerate(box.sizes) if length != shape[axis]), default=0)
        neighbours = math.prod(box.sizes[cut:]) if cut else 0
        yield Segment(place.start * row, math.prod(box.sizes), first, neighbours, shape[cut] * steps[cut] if cut else 0)
