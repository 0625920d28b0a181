"""The next micro-batch on its way to a GPU while this one computes.

A step's batch is read before the step before it is computed. Each micro-batch is copied on a stream of its own when the
one before it begins, be that of the same step or not; so one more of them is in the GPU's memory. On a processor
batches are read when they are asked for, and nothing is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from phalanx.data.loader import StepBatch
from phalanx.parallel.communication.copying import Copying
from phalanx.task import Batch

Place = Callable[[dict[str, Any]], Batch]


class OnItsWay(NamedTuple):
    """A micro-batch that is copied ahead."""

    tensors: dict[str, Any]
    """On the host."""
    placed: Batch
    arrived: Callable[[], None]


class Ahead:
    """What comes after the micro-batch that is computed."""

    def __init__(self, place: Place, device: torch.device) -> None:
        """``place``: copies a micro-batch to the device."""
        self._place, self._copying = place, Copying(device)
        self.used = device.type == "cuda"
        self._order: deque[dict[str, Any]] = deque()
        """Micro-batches that have been read, and not been taken."""
        self._coming: OnItsWay | None = None

    def read(self, batches: Iterator[StepBatch]) -> Iterator[StepBatch]:
        """The same batches, each read before the one before it is given. What goes wrong is told when it is due."""
        if not self.used:
            yield from batches
            return
        self._order.clear()
        self._coming = None
        now = self._next(batches)
        while isinstance(now, StepBatch):
            then = self._next(batches)
            yield now
            now = then
        if now is not None:
            raise now

    def _next(self, batches: Iterator[StepBatch]) -> StepBatch | Exception | None:
        try:
            batch = next(batches, None)
        except Exception as error:
            return error
        if batch is not None:
            self._order.extend(micro.tensors for micro in batch.micro_batches)
        return batch

    def __call__(self, tensors: dict[str, Any]) -> Batch:
        """A micro-batch on the device; the one after it is on its way from now on."""
        if not any(each is tensors for each in self._order):
            return self._place(tensors)  # of an evaluation, or a second time
        while self._order.popleft() is not tensors:
            pass
        coming, self._coming = self._coming, None
        if coming is not None and coming.tensors is tensors:
            coming.arrived()
            placed = coming.placed
        else:
            placed = self._place(tensors)
        if self._order:
            with self._copying.beside() as arrived:
                self._coming = OnItsWay(self._order[0], self._place(self._order[0]), arrived)
        return placed
