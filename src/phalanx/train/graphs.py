"""``graphs=step``: forward and backward of a step as one CUDA graph, recorded once and replayed.

A GPU then waits for no Python between its kernels, and the host has next to nothing to do. What a step leaves behind
in Python (which gradients there are, where they lie, what was logged) is kept with the graph, and put back after it
is replayed. What changes from step to step reaches the device through memory that the graph reads: the batch, and
what random numbers are keyed by. Sums over all ranks, clipping and the update stay outside.
"""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx.data.loader import MicroBatch, StepBatch
from phalanx.errors import WrongUse
from phalanx.kernels.documents import recorded as recorded_documents
from phalanx.parallel.communication.exposure import Collective
from phalanx.parallel.communication.instants import Instant
from phalanx.parallel.randomness.sending import Resent
from phalanx.train.totals import Totals
from phalanx.trees import ends, leaves, mapped

if TYPE_CHECKING:
    from phalanx.train.engine import Engine

WARM = 3
"""So many steps of a kind are computed as they come, before it is recorded: kernels are chosen and compiled in them."""
MOST = 4
"""So many kinds of batches are recorded; others are computed as they come."""
IN_VAIN, MOST_KINDS = 50, 1000
"""After so many steps without a graph that is said; of so many kinds it is known how often they came."""
Passes = Callable[[StepBatch], Totals]


@dataclass
class Recorded:
    """Forward and backward of one kind of batch, and what they leave behind."""

    graph: torch.cuda.CUDAGraph
    batch: StepBatch
    """Its tensors are where the graph reads them."""
    resent: Resent
    totals: Totals
    logged: Mapping[str, Any]
    touched: set[str]
    buckets: list[dict[str, Any]]
    phases: list[tuple[str, Instant]]
    collectives: list[Collective]
    sent: Counter[tuple[str, str]]
    calls: Counter[tuple[str, str]]


class StepGraphs:
    """The graphs of an engine's steps, one for each kind of batch: sizes, and which weights are trained."""

    def __init__(self, engine: Engine, passes: Passes) -> None:
        self.engine, self._passes = engine, passes
        self.stream: torch.cuda.Stream | None = None
        """Steps are computed beside torch's own stream from the first on, so that autograd's nodes belong to it. None:
        nothing is recorded."""
        self._pool: Any = None
        self._seen: Counter[Hashable] = Counter()
        self._plain = 0
        """Steps that were computed as they came."""
        self.recorded: dict[Hashable, Recorded] = {}
        if engine.layout.graphs == "none":
            return
        if engine.loss_scale.dynamic:
            raise WrongUse(
                "graphs=step is not offered with precision=fp16, whose loss is scaled by a number that changes. Use "
                "precision=bf16, or leave graphs=step out."
            )
        if engine.device.type == "cuda":
            self.stream = torch.cuda.Stream(engine.device)

    def __call__(self, batch: StepBatch) -> Totals:
        """Forward and backward of a step; what its losses add up to."""
        if self.stream is None:
            return self._passes(batch)
        self.engine.spread.settle()  # a graph would wait for what is on its way whenever it is replayed
        current = torch.cuda.current_stream(self.engine.device)
        key = self._kind(batch)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream), recorded_documents():
            recorded = self.recorded.get(key)
            self._seen[key] += 1
            if self._watched or (recorded is None and (self._seen[key] <= WARM or len(self.recorded) >= MOST)):
                totals = self._passes(batch)
                self._say_if_in_vain()
            else:
                recorded = recorded or self._record(key, batch)
                self._replay(recorded, batch)
                totals = recorded.totals
        current.wait_stream(self.stream)
        return totals

    def _say_if_in_vain(self) -> None:
        """Where steps are hardly ever of a kind, nothing is gained: that is said once."""
        self._plain += 1
        if len(self._seen) > MOST_KINDS:
            self._seen.clear()
        if self._plain == IN_VAIN and not self._watched:
            warnings.warn(
                f"graphs=step has computed {IN_VAIN} steps as they came, for want of batches of one size: up to {MOST} "
                "sizes are recorded, each after some steps. Pad or pack samples to one length, or leave it out.",
                stacklevel=4,
            )

    @property
    def _watched(self) -> bool:
        """Whether somebody looks at what happens on the way: a proof, a profile."""
        engine = self.engine
        at_gradients = engine.spread.reduction.on_gradient is not None
        return at_gradients or bool(engine.traffic.watchers) or engine.clock.is_watched

    def forget(self) -> None:
        """What is recorded may read memory that is not used any more."""
        for recorded in self.recorded.values():
            recorded.graph.reset()
        self.recorded.clear()
        self._pool = None  # it goes with its last graph

    def _kind(self, batch: StepBatch) -> Hashable:
        """Batches of one kind are computed by the same kernels."""
        engine = self.engine
        engine.take_turn(batch.step)
        fp8 = engine.spread.fp8
        sizes = [
            (micro.real, len(micro.slots), tuple(_size(end) for end in ends(micro.tensors)))
            for micro in batch.micro_batches
        ]
        return tuple(sizes), engine.task.turn(batch.step), engine.turns.fingerprint, fp8 and fp8.programs

    def _record(self, key: Hashable, batch: StepBatch) -> Recorded:
        engine = self.engine
        spread, traffic, clock = engine.spread, engine.traffic, engine.clock
        still = [
            MicroBatch(dict(mapped(torch.clone, engine.to_device(micro.tensors))), micro.slots, micro.real)
            for micro in batch.micro_batches
        ]
        own = StepBatch(batch.step, still, batch.slots, batch.samples)
        graph, resent = torch.cuda.CUDAGraph(), Resent(engine.device)
        sent, calls = traffic.sent.copy(), traffic.calls.copy()
        traffic.in_graph, spread.randomness.sender.recorded = True, resent
        last = engine.logged.kept()  # with the batch before this one, which is pinned
        try:
            with (
                _nothing_let_go(),
                clock.recording() as phases,
                traffic.exposure.recording() as collectives,
                torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"),
            ):
                totals = self._passes(own)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise WrongUse(
                f"a step of {type(engine.task).__name__} cannot be recorded as a CUDA graph: {_first_line(error)}. "
                "Mostly its model or its loss asks the GPU for a number on the way (.item(), .tolist(), if tensor:): "
                "leave that out, or graphs=step."
            ) from error
        finally:
            del last
            traffic.in_graph, spread.randomness.sender.recorded = False, None
            spread.randomness.forget()
        self._pool = graph.pool()
        found = Recorded(
            graph, own, resent, totals, engine.logged.kept(), set(spread.reduction.touched),
            [bucket.gradient_state() for bucket in spread.buckets], phases, collectives,
            traffic.sent - sent, traffic.calls - calls,
        )  # fmt: skip
        traffic.put_back(sent, calls)
        self.recorded[key] = found
        return found

    def _replay(self, recorded: Recorded, batch: StepBatch) -> None:
        engine = self.engine
        spread, traffic, moment = engine.spread, engine.traffic, engine.spread.moment
        for own, micro in zip(recorded.batch.micro_batches, batch.micro_batches, strict=True):
            for place, value in zip(leaves(own.tensors), leaves(engine.to_device(micro.tensors)), strict=True):
                place.copy_(value)
            moment.step, moment.slots, moment.real = batch.step, micro.slots, micro.real
            recorded.resent.renew(own.slots)
        recorded.graph.replay()
        engine.logged.put_back(recorded.logged)
        spread.reduction.touched = set(recorded.touched)
        for bucket, state in zip(spread.buckets, recorded.buckets, strict=True):
            bucket.put_back(state)
        engine.clock.replayed(recorded.phases)
        traffic.exposure.replayed(recorded.collectives)
        traffic.sent.update(recorded.sent)
        traffic.calls.update(recorded.calls)


@contextmanager
def _nothing_let_go() -> Iterator[None]:
    """Pinned memory that is let go while a graph is recorded is lost: torch would note in the graph when it is free."""
    gc.collect()
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def _size(value: Any) -> Hashable:
    """What is no tensor is part of the program."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    return value if isinstance(value, Hashable) else repr(value)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
