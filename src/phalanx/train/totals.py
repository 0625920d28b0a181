"""A step's totals and counts: of the loss, and of the losses that it is the sum of, by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx.data.loader import StepBatch
from phalanx.data.order import share
from phalanx.errors import WrongUse
from phalanx.losses import Loss

if TYPE_CHECKING:
    from phalanx.train.engine import Engine


class Totals:
    """What this rank adds up in a step, by micro-batch."""

    def __init__(self, engine: Engine, micro_batches: int) -> None:
        self.engine = engine
        self._sums = torch.zeros(micro_batches, 2, dtype=torch.float64, device=engine.device)
        self._named: dict[str, Tensor] = {}

    def add(self, micro: int, loss: Loss | None, real: bool) -> None:
        """A micro-batch's loss; one that is not real counts for nothing."""
        self._sums[micro] += real * counted(loss, self._sums[0])
        for name, part in loss.parts.items() if loss is not None else ():
            column = self._named.setdefault(name, torch.zeros_like(self._sums))
            column[micro] += real * counted(part, self._sums[0])

    def table(self) -> Tensor:
        """``[micro-batches, 2 x (1 + names)]``: total and count of the loss, then of each that has a name."""
        engine, found = self.engine, list(self._named)
        if engine.loss_names is None:
            engine.loss_names = engine.spread.from_last_stage(found)
        names = engine.loss_names
        if found and found != names:
            raise WrongUse(
                f"phalanx.losses.sum has {', '.join(found)} in this step, and had {', '.join(names) or 'no names'} "
                "before. Give the same names in every step; a loss without terms has a count of 0."
            )
        return torch.cat([self._sums, *(self._named.get(name, torch.zeros_like(self._sums)) for name in names)], 1)

    def by_name(self, agreed: Sequence[float], micro_batches: int) -> dict[str, float]:
        """The mean of each loss that has a name, from the sum of everybody's tables but for its first two columns."""
        names = self.engine.loss_names or []
        counts = dict(zip(names, agreed[1::2], strict=True))
        if micro_batches > 1 and len(set(counts.values())) > 1 and all(map(math.isfinite, counts.values())):
            told = ", ".join(f"{name} {count:g}" for name, count in counts.items())
            raise WrongUse(
                f"the losses of phalanx.losses.sum have different counts in this step ({told}), and it is cut into "
                f"{micro_batches} micro-batches: which share each has is known only after the last. Leave micro_batch "
                "and exact out of the layout, or give all the same count, such as the number of samples."
            )
        return {n: t / counts[n] if counts[n] else math.nan for n, t in zip(names, agreed[::2], strict=True)}


def counted(loss: Loss | None, like: Tensor) -> Tensor:
    """A loss's total and count; nothing, before the last stage."""
    if loss is None:
        return torch.zeros_like(like)
    return torch.stack([as_number(loss.total, like), as_number(loss.count, like)])


def as_number(value: Any, like: Tensor) -> Tensor:
    """A loss's total or count as one detached number beside ``like``."""
    if isinstance(value, Tensor):
        return value.detach().to(like).reshape(())
    return torch.tensor(float(value), dtype=like.dtype, device=like.device)


def share_out(engine: Engine, batch: StepBatch) -> None:
    """Let a loss that compares samples know how many of a batch each rank has."""
    ranks = engine.layout.batch_ranks

    def sizes() -> list[int]:
        return [stop - start for rank in range(ranks) for start, stop in share(batch.slots, 1, ranks, rank)]

    engine.spread.samples.start(len(batch.micro_batches), sizes)
