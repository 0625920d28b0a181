"""Loading: the micro-batches of one rank, from any step on, with workers that read ahead.

A rank that has no sample in a micro-batch gets a stand-in with ``real=False``: it computes along, so that nobody
waits for it, and counts for nothing.
"""

from __future__ import annotations

import random
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from phalanx import counter
from phalanx.data.kinds import check_rows, check_values, not_a_sample, unstackable
from phalanx.data.order import Order, digest, leaf, share
from phalanx.data.splitting import by_rows
from phalanx.errors import WrongUse, may_pass
from phalanx.processes import aside, die_with_parent
from phalanx.traces import Traced, folded, whole

T = TypeVar("T")


@dataclass
class MicroBatch:
    """Samples that go through the model together: their batch, and their slots in the step's global batch."""

    tensors: dict[str, Any]
    slots: np.ndarray
    real: bool = True


@dataclass
class StepBatch:
    """All that one rank computes in one step."""

    step: int
    micro_batches: list[MicroBatch]
    slots: int
    """Samples of this step over all ranks."""
    samples: str
    """A hash of the global batch's sample ids."""


def seed_globally(*key: int | str) -> None:
    """Seed the generators that people's data code draws from, by a key that does not depend on the rank."""
    seed = counter.key(*key) & 0xFFFFFFFF
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


def sample_at(data: Any, index: int, seed: int, epoch: int = 0) -> Any:
    """One sample; what is drawn while it is made follows from the seed, the epoch and its number."""
    seed_globally(seed, "sample", epoch, index)
    return data[index]


@dataclass(frozen=True)
class MicroBatchPlan:
    """What to read for one micro-batch."""

    epoch: int
    ids: np.ndarray
    slots: np.ndarray
    real: bool


class Reader(Dataset):
    """Reads and collates the samples of a plan; each sample's own randomness is seeded by (seed, epoch, sample)."""

    def __init__(self, data: Any, collate: Callable[[Sequence[Any]], dict[str, Any]], seed: int, plain: bool) -> None:
        self.data, self.collate, self.seed, self.plain = data, collate, seed, plain

    def __getitem__(self, plan: MicroBatchPlan) -> dict[str, Any] | WrongUse | Traced:
        what, samples = "", []
        try:
            if self.plain and by_rows(self.data):
                return self.data.batch(plan.ids)
            for index in plan.ids.tolist():
                what = f"sample {index} cannot be read"
                samples.append(self._sample(index, plan.epoch))
            what = f"samples {', '.join(map(str, plan.ids[:8]))}{', …' if len(plan.ids) > 8 else ''} make no batch"
            if self.plain:
                check_values(samples[0], int(plan.ids[0]), self.data)
            batch = self.collate(samples)
            if not self.plain and isinstance(batch, Mapping):
                check_rows(batch, samples)
            return batch
        except Exception as error:  # handed over rather than raised, or a worker's traceback would wrap it
            if self.plain and len(samples) == len(plan.ids) and (found := unstackable(samples, plan.ids.tolist())):
                return found
            if isinstance(error, WrongUse):
                return error
            return Traced(f"{what}: {type(error).__name__}: {error}", folded(error), whole(error), may_pass(error))

    def read(self, index: int) -> dict[str, Any]:
        """One sample alone, as a batch."""
        return _checked(self[MicroBatchPlan(0, np.array([index]), np.zeros(1, dtype=np.int64), True)])

    def _sample(self, index: int, epoch: int) -> Any:
        sample = sample_at(self.data, index, self.seed, epoch)
        if not isinstance(sample, dict):
            raise not_a_sample(sample, index)
        return sample


class Loader:
    """One rank's part of every step's batch."""

    def __init__(
        self,
        data: Any,
        collate: Callable[[Sequence[Any]], dict[str, Any]],
        order: Order,
        *,
        micro_batches: int,
        ranks: int,
        rank: int,
        workers: int = 0,
        pin: bool = False,
        plain: bool = False,
        leaves: Sequence[int] = (),
        together: int = 0,
    ) -> None:
        """``plain``: samples are only stacked, so that arrays may give many rows at once.

        ``leaves``: which virtual micro-batches are this rank's, of as many as all ranks have together. ``together``: so
        many ranks make a step with each other, if not all do.
        """
        self.leaves, self.together = leaves, together or ranks
        self.order, self.micro_batches, self.ranks, self.rank = order, micro_batches, ranks, rank
        self.workers, self.pin = workers, pin
        self.reader = Reader(data, collate, order.seed, plain)

    def plans(self, step: int, ids: np.ndarray) -> list[MicroBatchPlan]:
        """What this rank reads of a step's samples."""
        if self.leaves:
            ranges = [leaf(len(ids), len(self.leaves) * self.ranks, index) for index in self.leaves]
        else:
            ranges = share(len(ids), self.micro_batches, self.ranks, self.rank)
        return [self._plan(step, ids, *found) for found in ranges]

    def spans(self, slots: int) -> list[list[tuple[int, int]]]:
        """By rank of those that make a step together, and by micro-batch, which slots it computes."""
        first = self.rank - self.rank % self.together
        return [share(slots, self.micro_batches, self.ranks, first + rank) for rank in range(self.together)]

    def _plan(self, step: int, ids: np.ndarray, start: int, stop: int) -> MicroBatchPlan:
        real = stop > start
        if not real:  # stand in with a neighbour's sample
            start, stop = (start, start + 1) if start < len(ids) else (start - 1, start)
        return MicroBatchPlan(self.order.epoch(step), ids[start:stop], np.arange(start, stop), real)

    def first(self, step: int) -> MicroBatch:
        """A step's first micro-batch, whoever computes it."""
        ids = self.order.ids(step)
        if self.leaves:
            found = leaf(len(ids), len(self.leaves) * self.ranks, 0)
        else:
            found = share(len(ids), self.micro_batches, self.ranks, 0)[0]
        plan = self._plan(step, ids, *found)
        return MicroBatch(_checked(self.looked_at(lambda: self.reader[plan])), plan.slots, plan.real)

    def looked_at(self, function: Callable[[], T]) -> T:
        """What a function that reads samples gives. Workers must find nothing that it has opened: two that share a file
        would read where the other one has left off."""
        return aside(partial(_on_one_thread, function)) if self.workers else function()

    def batches(self, start: int, stop: int) -> Iterator[StepBatch]:
        """The batches of steps ``start:stop``; beginning at any step costs the same."""
        asked: deque[tuple[np.ndarray, list[MicroBatchPlan]]] = deque()

        def upcoming() -> Iterator[MicroBatchPlan]:
            for step in range(start, stop):
                ids = self.order.ids(step)
                asked.append((ids, self.plans(step, ids)))
                yield from asked[-1][1]

        read = iter(self._reading(upcoming()))
        try:
            for step in range(start, stop):
                first = _checked(next(read))
                ids, plans = asked.popleft()
                tensors = [first, *(_checked(next(read)) for _ in plans[1:])]
                micro = [MicroBatch(batch, plan.slots, plan.real) for batch, plan in zip(tensors, plans, strict=True)]
                yield StepBatch(step, micro, len(ids), digest(ids))
        finally:
            del read  # ends the workers, also where an error's traceback would keep them

    def _reading(self, plans: Iterator[MicroBatchPlan]) -> DataLoader:
        options: dict[str, Any] = {"sampler": plans, "num_workers": self.workers, "pin_memory": self.pin}
        if self.workers:
            options |= {"prefetch_factor": 2, "multiprocessing_context": "fork", "worker_init_fn": _worker}
        return DataLoader(self.reader, batch_size=None, **options)


def _on_one_thread(function: Callable[[], T]) -> T:
    torch.set_num_threads(1)  # as torch's own workers do: threads of OpenMP do not survive a fork
    return function()


def _worker(_: int) -> None:
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a scheduler gives it to everybody; the rank still needs its samples


def _checked(batch: dict[str, Any] | WrongUse | Traced) -> dict[str, Any]:
    if isinstance(batch, (WrongUse, Traced)):
        raise batch
    return batch
