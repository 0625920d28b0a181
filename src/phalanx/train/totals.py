"""A step's totals and counts: of the loss, of the losses that it is the sum of, by name, and of what is logged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx.data.loader import MicroBatch
from phalanx.errors import WrongUse
from phalanx.losses import Loss

if TYPE_CHECKING:
    from phalanx.train.engine import Engine

OF = "\0"
"""Between the name of a loss and that of one it is the sum of."""


class Totals:
    """What this rank adds up in a step, by micro-batch."""

    def __init__(self, engine: Engine, micro_batches: Sequence[MicroBatch]) -> None:
        self.engine, self.micro_batches = engine, len(micro_batches)
        self._sums = torch.zeros(len(micro_batches), 2, dtype=torch.float64, device=engine.device)
        engine.logged.start(micro_batches, self._sums)
        self._named: dict[str, Tensor] = {}

    def add(self, micro: int, loss: Loss | None, real: bool) -> None:
        """A micro-batch's loss; one that is not real counts for nothing."""
        self._sums[micro] += real * counted(loss, self._sums[0])
        for name, part in loss.parts.items() if loss is not None else ():
            column = self._named.setdefault(name, torch.zeros_like(self._sums))
            column[micro] += real * counted(part, self._sums[0])

    def table(self) -> Tensor:
        """``[micro-batches, 2 x (1 + names)]``: total and count of the loss, of those with names, of what is logged.

        Of ranks that have the same samples one brings the losses; what is logged all bring, each of its part of them.
        """
        spread, found = self.engine.spread, list(self._named)
        if spread.samples.known.names is None:
            spread.samples.known.names = spread.from_last_stage(found)
        names = spread.samples.known.names
        if found and found != names:
            raise WrongUse(
                f"phalanx.losses.sum has {', '.join(found)} in this step, and had {', '.join(names) or 'no names'} "
                "before. Give the same names in every step; a loss without terms has a count of 0."
            )
        self.engine.signals.new_names = bool(self.engine.logged.unknown)
        losses = [self._sums, *(self._named.get(name, torch.zeros_like(self._sums)) for name in names)]
        return torch.cat([torch.cat(losses, 1) * self.engine.mesh.counts_samples, *self.engine.logged.table()], 1)

    @property
    def _names(self) -> list[str]:
        return self.engine.spread.samples.known.names or []

    def logged(self, agreed: Sequence[float], more: bool) -> dict[str, float]:
        """The mean of all that is logged; ``more``: under names that not all ranks know yet."""
        return self.engine.logged.means(agreed[2 * len(self._names) :], more)

    def by_name(self, agreed: Sequence[float]) -> dict[str, float]:
        """The mean of each loss that has a name, from the sum of everybody's tables but for its first two columns."""
        samples, names = self.engine.spread.samples, self._names
        agreed = agreed[: 2 * len(names)]
        counts = dict(zip(names, agreed[1::2], strict=True))
        if self.micro_batches > 1 and len(set(counts.values())) > 1 and not samples.known.all_at_once:
            told = ", ".join(f"{name} {count:g}" for name, count in counts.items())
            samples.need_all(
                f"losses that are summed have different counts ({told}), whose share of the global batch must be known"
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
    return torch.full(
        (), float(value), dtype=like.dtype, device=like.device
    )  # filled there: a copy would be waited for


def spelled_out(name: str, loss: Loss) -> dict[str, Loss]:
    """A measure, and those that it is the sum of, under names that nobody else gives."""
    return {name: loss, **{f"{name}{OF}{part}": found for part, found in loss.parts.items()}}


def added_up(means: dict[str, float]) -> dict[str, float]:
    """Measures with those that they are the sum of, which then make up the whole, each by its own count."""
    found = {name: value for name, value in means.items() if OF not in name}
    for name, value in means.items():
        whole, of, part = name.partition(OF)
        if of:
            found[whole] = sum(other for key, other in means.items() if key.startswith(whole + OF))
            found[f"{whole}/{part}"] = value
    return found


def by_leaf(engine: Engine, rows: Tensor) -> Tensor:
    """Rows of every rank's virtual micro-batches, rank by rank, in the order of those."""
    leaves = [leaf for rank in range(engine.layout.batch_ranks) for leaf in engine.layout.leaves(rank)]
    return rows[torch.tensor(leaves, device=rows.device).argsort()]
