"""Where a rank's piece lies in the whole weight, as boxes: the one map that checkpoints of any layout are read by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from phalanx.parallel.axes.cuts import Cut
from phalanx.parallel.weights.bucket import Rows, Weight


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


def boxes(weight: Weight | Rows, cut: Cut | None, index: int, piece: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """The boxes that ``piece``, a rank's rows of a weight or of its moments, consists of, each with its view.

    ``cut`` is how ``tp`` or ``ep`` has divided the weight, and ``index`` this rank's place there.
    """
    if not piece.numel():
        return
    if not weight.shape:
        yield Box((), ()), piece.view(())
        return
    rest = (0,) * (len(weight.shape) - 1)
    if cut is None:
        yield Box((weight.first, *rest), tuple(piece.shape)), piece
        return
    local = 0  # where the next span begins in what this rank has of the cut dim
    for start, stop in cut.spans[index]:
        length = stop - start
        if cut.dim == 0:
            a, b = max(local, weight.first), min(local + length, weight.last)
            if a < b:
                view = piece[a - weight.first : b - weight.first]
                yield Box((start + a - local, *rest), tuple(view.shape)), view
        else:
            view = piece.narrow(cut.dim, local, length)
            offsets = [weight.first, *rest]
            offsets[cut.dim] = start
            if view.numel():
                yield Box(tuple(offsets), tuple(view.shape)), view
        local += length
