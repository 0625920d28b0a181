"""Loading: the micro-batches of one rank, from any step on, with workers that read ahead.

A rank that has no sample in a micro-batch gets a stand-in with ``real=False``: it computes along, so that nobody
waits for it, and counts for nothing.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from phalanx.data.kinds import BrokenStream, check_rows, check_values, not_a_sample, unstackable
from phalanx.data.order import Order, digest, leaf, share
from phalanx.data.seeding import SampleReader
from phalanx.data.splitting import by_rows
from phalanx.errors import WrongUse, may_pass
from phalanx.processes import aside, die_with_parent
from phalanx.task import BadRows, Batch
from phalanx.traces import Traced, described, folded, whole

T = TypeVar("T")
LOOKED_AT = 1000
"""So many samples are tried for one to stand in for bad ones."""


class BadSample(NamedTuple):
    """A sample that cannot be read, and why."""

    number: int
    reason: str


class Incomplete(NamedTuple):
    """A batch without some of its samples; one that has none left is a stand-in."""

    tensors: dict[str, Any]
    kept: list[int]
    """Places of those that it has, among those that were asked for."""
    bad: tuple[BadSample, ...]


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
    bad: tuple[BadSample, ...] = ()
    """Those of this rank that could not be read, and are left out."""

    def __getitem__(self, name: str) -> Any:
        """A column of this rank's samples, of all micro-batches together: ``batch["x"]``."""
        parts = [micro.tensors for micro in self.micro_batches if micro.real] or [self.micro_batches[0].tensors]
        found = [Batch(part)[name] for part in parts]
        if not any(micro.real for micro in self.micro_batches):  # it has none, and stands in with another's
            found = [found[0][:0]]
        try:
            return found[0] if len(found) == 1 else joined(found)
        except (RuntimeError, TypeError) as error:
            raise WrongUse(
                f"{name!r} of this rank's {len(parts)} micro-batches cannot be joined: {str(error).splitlines()[0]}. "
                f"Look at each by itself: batch.micro_batches[0].tensors[{name!r}]."
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self.micro_batches[0].tensors

    def __iter__(self) -> Iterator[str]:
        """The names of its columns."""
        return iter(self.micro_batches[0].tensors)


def joined(parts: Sequence[Any]) -> Any:
    """Columns of several batches as one."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat([*parts])
    if isinstance(first, Mapping):
        return {name: joined([part[name] for part in parts]) for name in first}
    if isinstance(first, (list, tuple)):
        return [item for part in parts for item in part]
    raise TypeError(f"each is {described(first)}")


def reason_of(error: Exception) -> str:
    """Why a sample cannot be read, in one line."""
    first = (str(error).splitlines() or [""])[0]
    return first if isinstance(error, WrongUse) else f"{type(error).__name__}: {first}"


@dataclass(frozen=True)
class MicroBatchPlan:
    """What to read for one micro-batch."""

    ids: np.ndarray
    visits: np.ndarray
    """Which visit of each sample this is: its epoch, or its number among all draws where samples are drawn."""
    slots: np.ndarray
    real: bool


class Reader(Dataset):
    """Reads and collates the samples of a plan; each sample's own randomness is seeded by (seed, visit, sample)."""

    def __init__(
        self,
        data: Any,
        collate: Callable[[Sequence[Any]], dict[str, Any]],
        seed: int,
        plain: bool,
        bad_rows: BadRows = "stop",
    ) -> None:
        self.collate, self.plain, self.bad_rows = collate, plain, bad_rows
        self.samples = SampleReader(data, seed)

    @property
    def data(self) -> Any:
        """What samples are read from. It may be replaced, by the same samples with more columns."""
        return self.samples.data

    @data.setter
    def data(self, data: Any) -> None:
        self.samples = SampleReader(data, self.samples.seed)

    def __getitem__(self, plan: MicroBatchPlan) -> dict[str, Any] | Incomplete | WrongUse | Traced:
        found = self._batch(plan)
        skips = self.bad_rows == "skip" and isinstance(found, (WrongUse, Traced)) and not may_pass(found)
        return self._without_bad(plan, found) if skips else found

    def _without_bad(self, plan: MicroBatchPlan, failed: Any) -> Any:
        """A batch of those samples that can be read; ``failed``: what came of all of them."""
        good, bad = list[int](), list[BadSample]()
        for place, (index, visit) in enumerate(zip(plan.ids.tolist(), plan.visits.tolist(), strict=True)):
            try:
                self._sample(index, visit)
                good.append(place)
            except Exception as error:
                if may_pass(error) or isinstance(error, BrokenStream):
                    return failed
                bad.append(BadSample(index, reason_of(error)))
        if not bad:
            return failed  # they can be read, and make no batch
        ids = plan.ids[good] if good else self._readable(plan)
        visits = plan.visits[good] if good else plan.visits[:1]
        batch = failed if ids is None else self._batch(replace(plan, ids=ids, visits=visits))
        return batch if isinstance(batch, (WrongUse, Traced)) else Incomplete(batch, good, tuple(bad))

    def _readable(self, plan: MicroBatchPlan) -> np.ndarray | None:
        """A sample that can be read, to stand in for others; None: there is none near."""
        first = int(plan.ids[-1])
        for index in range(first + 1, first + 1 + LOOKED_AT):
            with suppress(Exception):
                self._sample(index % len(self.data), int(plan.visits[0]))
                return np.array([index % len(self.data)])
        return None

    def _batch(self, plan: MicroBatchPlan) -> dict[str, Any] | WrongUse | Traced:
        what, samples = "", list[Any]()
        try:
            if self.plain and by_rows(self.data):
                return self.data.batch(plan.ids)
            visits = [*zip(plan.ids.tolist(), plan.visits.tolist(), strict=True)]
            for index, visit in visits:
                what = f"sample {index} cannot be read"
                samples.append(self._sample(index, visit))
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
        first = np.zeros(1, dtype=np.int64)
        found = _checked(self[MicroBatchPlan(np.array([index]), first, first, True)])
        return found.tensors if isinstance(found, Incomplete) else found

    def _sample(self, index: int, visit: int) -> Any:
        sample = self.samples.read(index, visit)
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
        bad_rows: BadRows = "stop",
        leaves: Sequence[int] = (),
        together: int = 0,
    ) -> None:
        """``plain``: samples are only stacked, so that arrays may give many rows at once.

        ``bad_rows``: one that cannot be read ends the run, or is left out, and all others stay where they are.
        ``leaves``: which virtual micro-batches are this rank's, of as many as all ranks have together. ``together``: so
        many ranks make a step with each other, if not all do.
        """
        self.leaves, self.together = leaves, together or ranks
        self.order, self.micro_batches, self.ranks, self.rank = order, micro_batches, ranks, rank
        self.workers, self.pin = workers, pin
        self.bad: dict[int, str] = {}
        """Samples that could not be read so far, and why."""
        self.reader = Reader(data, collate, order.seed, plain, bad_rows)

    def plans(self, step: int, ids: np.ndarray) -> list[MicroBatchPlan]:
        """What this rank reads of a step's samples."""
        tokens = self.order.tokens(ids)
        if self.leaves:
            ranges = [leaf(len(ids), len(self.leaves) * self.ranks, index, tokens) for index in self.leaves]
        else:
            ranges = share(len(ids), self._micro_batches(ids), self.ranks, self.rank, tokens)
        return [self._plan(step, ids, *found) for found in ranges]

    def _micro_batches(self, ids: np.ndarray) -> int:
        return self.order.micro_batches(len(ids), self.micro_batches)

    def spans(self, step: int) -> list[list[tuple[int, int]]]:
        """By rank of those that make a step together, and by micro-batch, which slots of it it computes."""
        tokens, first = self.order.tokens(ids := self.order.ids(step)), self.rank - self.rank % self.together
        ranks = range(first, first + self.together)
        return [share(len(ids), self._micro_batches(ids), self.ranks, rank, tokens) for rank in ranks]

    def widths(self, step: int) -> list[int]:
        """How many samples each micro-batch of a step has, over the ranks that make a step together."""
        ids = self.order.ids(step)
        number, tokens = self._micro_batches(ids), self.order.tokens(ids)
        if self.together == self.ranks:
            return [stop - start for start, stop in share(len(ids), number, 1, 0, tokens)]
        every = [share(len(ids), number, self.ranks, rank, tokens) for rank in range(self.ranks)]
        sites = (every[first : first + self.together] for first in range(0, self.ranks, self.together))
        return [sum(stop - start for start, stop in micro) for site in sites for micro in zip(*site, strict=True)]

    def _plan(self, step: int, ids: np.ndarray, start: int, stop: int) -> MicroBatchPlan:
        real = stop > start
        if not real:  # stand in with a neighbour's sample
            start, stop = (start, start + 1) if start < len(ids) else (start - 1, start)
        slots = np.arange(start, stop)
        return MicroBatchPlan(ids[start:stop], self.order.visits(step, slots), slots, real)

    def first(self, step: int) -> MicroBatch:
        """A step's first micro-batch, whoever computes it."""
        tokens = self.order.tokens(ids := self.order.ids(step))
        if self.leaves:
            found = leaf(len(ids), len(self.leaves) * self.ranks, 0, tokens)
        else:
            found = share(len(ids), self._micro_batches(ids), self.ranks, 0, tokens)[0]
        plan = self._plan(step, ids, *found)
        return _micro_batch(_checked(self.looked_at(lambda: self.reader[plan])), plan)

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
                found = [first, *(_checked(next(read)) for _ in plans[1:])]
                pairs = [*zip(found, plans, strict=True)]
                micro = [_micro_batch(batch, plan) for batch, plan in pairs]
                bad = tuple(bad for batch, plan in pairs if plan.real for bad in getattr(batch, "bad", ()))
                yield StepBatch(step, micro, len(ids), digest(ids), bad)
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


def _checked(batch: dict[str, Any] | Incomplete | WrongUse | Traced) -> Any:
    if isinstance(batch, (WrongUse, Traced)):
        raise batch
    return batch


def _micro_batch(batch: dict[str, Any] | Incomplete, plan: MicroBatchPlan) -> MicroBatch:
    if not isinstance(batch, Incomplete):
        return MicroBatch(batch, plan.slots, plan.real)
    if not batch.kept:
        return MicroBatch(batch.tensors, plan.slots[:1], real=False)
    return MicroBatch(batch.tensors, plan.slots[batch.kept], plan.real)
