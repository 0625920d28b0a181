"""A part of a tensor of one device, and where in it the part lies: which samples, positions and features."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from phalanx.parallel.axes.cuts import Span
from phalanx.parallel.communication.differentiable import run
from phalanx.train.engine import Engine


@dataclass
class Piece:
    """A part of a tensor of one device, and where it may lie in it."""

    tensor: Tensor
    slots: np.ndarray
    times: list[Tensor] = field(default_factory=list)
    """Positions that it may hold, the likeliest first."""
    features: list[tuple[Span, ...]] = field(default_factory=list)
    """Likewise, of its last dim."""

    def beside(self, whole: Tensor, batch: int) -> tuple[Tensor, Tensor] | None:
        """This and the part of ``whole`` that it should be, of one shape; None where that cannot be told."""
        found = self.tensor
        if found.ndim != whole.ndim:
            return None
        if not found.ndim or whole.shape[0] % batch or found.shape[0] % len(self.slots):
            return (found, whole) if found.shape == whole.shape else None
        found, whole = found.unflatten(0, (len(self.slots), -1)), whole.unflatten(0, (batch, -1))
        whole = whole[torch.from_numpy(self.slots)]
        for dim in range(1, whole.ndim):
            if found.shape[dim] == whole.shape[dim]:
                continue
            index = self._index(dim, found.shape[dim], whole)
            if index is None:
                return None
            whole = whole.index_select(dim, index)
        return found, whole

    def _index(self, dim: int, wanted: int, whole: Tensor) -> Tensor | None:
        if dim == whole.ndim - 1:
            for spans in self.features:
                places = torch.cat([torch.arange(*span) for span in spans])
                if len(places) == wanted and int(places.max()) < whole.shape[dim]:
                    return places
        for places in self.times:
            if len(places) == wanted and (not wanted or int(places.max()) < whole.shape[dim]):
                return places
        # what is left was padded further where more samples were together
        return torch.arange(wanted) if not self.times and wanted < whole.shape[dim] else None


def times_here(engine: Engine) -> list[Tensor]:
    """The positions of sequences that this rank may hold just now, the likeliest first."""
    stream, tp, context = engine.spread.activations.stream, engine.mesh.group("tp"), engine.spread.context
    here, time = stream.positions, stream.length
    sets = [here] if here is not None else []
    if context is not None and here is None and time:
        sets.append(context.places(time, context.rank))
    sequence_parallel = engine.spread.plan.sequence_parallel and not tp.alone
    found = []
    for places in [*sets, *([torch.arange(time)] if sequence_parallel or sets else [])]:
        if sequence_parallel:
            found.append(places[slice(*run(len(places), tp.size, tp.rank))])
        found.append(places)
    return found
