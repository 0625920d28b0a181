"""`phalanx.gather` and `phalanx.rows`: the samples of the whole global batch, for losses that compare samples.

While an engine computes a micro-batch, the engine answers (`parallel.axes.samples`). Without one, in a notebook or a
test, a batch is all there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor


class GlobalBatch(Protocol):
    """Who has the samples of all ranks and micro-batches."""

    def gathered(self, x: Tensor) -> Tensor:
        """``x`` of all samples."""

    def own(self, x: Tensor) -> Tensor:
        """Which rows of that are those of ``x``."""


calls = 0
"""How often `gather` was called since the process began: whoever divides a batch can tell by it who needs all of it."""
_now: GlobalBatch | None = None


def gather(x: Tensor) -> Tensor:
    """``x`` of all samples of the global batch, in the order of one device; call it in ``Task.loss``.

    ``x`` has one row a sample. `rows` says which of them are this rank's own, whose loss it counts. Gradients flow
    back. Where no engine computes, a batch is all there is, and ``x`` is given back.
    """
    global calls
    calls += 1
    return x if _now is None else _now.gathered(x)


def rows(x: Tensor) -> Tensor:
    """Which rows of ``gather(x)`` are those of ``x``: the classes of a contrastive loss, for example."""
    if _now is None:
        return torch.arange(len(x), device=x.device)
    return _now.own(x)


@contextmanager
def answered_by(batch: GlobalBatch | None) -> Iterator[None]:
    """Meanwhile `gather` and `rows` ask this; with None, a batch is all there is."""
    global _now
    outer, _now = _now, batch
    try:
        yield
    finally:
        _now = outer
