"""One training step, top to bottom, for every layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from phalanx.data.loader import MicroBatch, StepBatch
from phalanx.errors import WrongUse
from phalanx.losses import Loss
from phalanx.parallel.axes.pipeline import StageEnds
from phalanx.parallel.axes.schedules import Action
from phalanx.parallel.communication.mesh import BATCH
from phalanx.parallel.randomness.answers import check_unmoved, generator_state
from phalanx.precision import cast
from phalanx.task import Task, as_loss, called
from phalanx.train.signals import Signals
from phalanx.train.step_agreement import agree, nobody_touched, summed_over_ranks
from phalanx.train.totals import Totals, counted

if TYPE_CHECKING:
    from phalanx.train.engine import Engine
    from phalanx.train.rounds import Rounds
    from phalanx.train.sites import SitesRound


@dataclass
class Metrics:
    """What a step did, the same on every rank but for the seconds, and for bytes, signals and flops of its own.

    Where sites train by themselves (``comm=local:H``, ``comm=diloco:H``) the loss, what is logged, the norm, the count,
    and whether the step was bad are those of this rank's site alone, over its share of the global batch; ``slots`` and
    ``samples`` are of the whole one. What all sites did is in ``round``, the same on every rank, after steps after
    which they agree.
    """

    step: int
    loss: float
    """Per term of the loss, over the global batch."""
    losses: dict[str, float]
    """Of those that it is the sum of, by name."""
    logged: dict[str, float]
    """What the task and its model log, by name: each a mean over the global batch."""
    grad_norm: float
    """Of the mean gradient, before clipping."""
    clip_factor: float
    """What the gradient was multiplied by; 1 where it was short enough. Of weights that have no limit of their own."""
    lr: float
    count: float
    """Terms of the loss in the global batch: samples, or tokens."""
    slots: int
    samples: str
    """How many are in the global batch, and a hash of their ids."""
    skipped: bool
    """Something was bad, or nothing counted, so no rank updated."""
    bad: str
    """What was, if anything: a number that is not finite, a loss far beyond the last ones."""
    seconds: dict[str, float]
    sent: dict[str, int]
    """Bytes this rank sent, by axis."""
    communication: dict[str, float]
    """Seconds that collectives took of it, ``exposed_AXIS`` and ``overlapped_AXIS`` with what it computed."""
    signals: Signals = field(default_factory=Signals)
    turn: str = ""
    """Whose turn it was, where steps train parts of a model in turn."""
    flops: float = 0.0
    """Of the model for this rank's share of the samples, where they are known."""
    round: SitesRound | None = None
    """Of all sites, since they last agreed, where they do after this step."""


def train_step(engine: Engine, batch: StepBatch, rounds: Rounds | None = None) -> Metrics:
    """Forward and backward of each micro-batch, one division by the global count, one clip, one update.

    ``rounds``: the losses of all micro-batches, where none of them can be had alone.
    """
    spread, scale, clock = engine.spread, engine.loss_scale, engine.clock
    if spread.probe.untried:
        try_blocks(engine, batch)
    engine.update.begin(batch.step, scale.value)
    before = engine.traffic.start_step()
    engine.step_sum.expect()
    totals = engine.graphs(batch) if rounds is None else passes(engine, batch, rounds)

    clock.begin("update")
    spread.complete_gradients()
    engine.update.prepare()

    # From here on all ranks hold the same numbers.
    held = agree(engine, batch.step, totals.table())
    total, count = held.total, held.count
    named, logged = totals.by_name(held.named), totals.logged(held.named, held.signals.new_names)
    without = nobody_touched(engine) if held.missing else set()
    held = held.leaving_out(engine, without) if without else held

    divisor = (count if count > 0 else 1.0) * scale.value
    norm = held.norm / divisor
    mean = total / count if count else math.nan
    finite = math.isfinite(norm) and math.isfinite(total)
    overflow = scale.dynamic and scale.value > 1 and math.isfinite(total) and not finite  # the scale will mend that
    bad = engine.guard.judge(mean, norm) if count > 0 and not overflow else ""
    engine.callbacks.call("on_gradients", engine, divisor, without)

    lr = engine.set_learning_rate(batch.step)
    clip_factor, apart = engine.clipping.factors(norm, held.norms, divisor)
    engine.callbacks.call("before_update", engine)
    if counts := finite and not bad and count > 0:
        engine.update(clip_factor / divisor, without, {n: own / divisor for n, own in apart.items()}, divisor, count)
    else:
        engine.update.forget()
    spread.end_step(counts, scale.update(finite), without)
    return Metrics(
        step=batch.step,
        loss=mean,
        losses=named,
        logged=logged,
        grad_norm=norm,
        clip_factor=clip_factor,
        lr=lr,
        count=round(count) if count == round(count) else count,
        slots=batch.slots,
        samples=batch.samples,
        skipped=not counts,
        bad=bad,
        seconds=(seconds := clock.seconds()),
        sent=engine.traffic.sent_since(before),
        communication=engine.traffic.end_step(seconds),
        signals=held.signals,
    )


def passes(engine: Engine, batch: StepBatch, rounds: Rounds | None = None) -> Totals:
    """Forward and backward of each micro-batch: gradients are summed over ranks, and losses on this one."""
    spread, scale, clock = engine.spread, engine.loss_scale, engine.clock
    spread.reduction.start_step(as_made=engine.update.takes_as_made and len(batch.micro_batches) == 1)
    spread.reduction.expect()
    totals = Totals(engine, batch.micro_batches)
    actions = spread.actions(len(batch.micro_batches))
    spread.start(batch.micro_batches, actions)
    for index, action in enumerate(actions):
        micro = batch.micro_batches[action.micro]
        last = index + 1 == len(actions)
        if action.kind == "forward":
            with engine.logged.taking():
                loss = forward(engine, batch.step, micro, action, rounds)
            totals.add(action.micro, loss, micro.real)
            if spread.nears_loss(action):
                scale.begin(partial(_global_count, engine, loss, len(batch.micro_batches)))
            continue
        if action.kind == "backward":
            if spread.pipeline is not None:
                clock.begin("wait")
                spread.pipeline.await_gradient(action)
            clock.begin("backward")
            spread.backward(action, scale.value * micro.real / engine.mesh.size("cp"), last)
        else:
            clock.begin("backward")
            spread.backward_weights(action, last)
        clock.begin("reduce")
        spread.reduction.finish_backward()
    return totals


def forward(engine: Engine, step: int, micro: MicroBatch, action: Action, rounds: Rounds | None = None) -> Loss | None:
    """A stage's part of a micro-batch, and at the last stage its loss."""
    if rounds is not None:
        engine.loss_scale.begin(partial(_global_count, engine, rounds.results[0], len(rounds.results)))
        if not action.micro:
            rounds.differentiate(engine.loss_scale.value)
        compute(engine, step, micro, action, partial(rounds.backward_begins, action.micro))
        return rounds.results[action.micro]

    def finish(output: Any, tensors: dict[str, Any]) -> Loss:
        loss = task_loss(engine, output, tensors)
        if not loss.total.requires_grad:
            raise independent(engine.task)
        return loss

    return compute(engine, step, micro, action, finish)


def task_loss(engine: Engine, output: Any, tensors: dict[str, Any]) -> Loss:
    """What a task makes of a micro-batch's output."""
    loss = as_loss(engine.task.loss(output, tensors), engine.task)
    engine.spread.samples.ended()
    return loss


def independent(task: Task, why: str = "") -> WrongUse:
    return WrongUse(
        f"the loss of {type(task).__name__} does not depend on any trainable weight{why}. "
        "Compute it from the model's output, without detach(), item() or no_grad()."
    )


def try_blocks(engine: Engine, batch: StepBatch) -> None:
    """Before the first step: its first micro-batch goes through the model once for blocks to be tried."""
    actions, before = engine.spread.forwards(1), copies(engine.spread.model)
    engine.spread.start(batch.micro_batches[:1], actions)
    with engine.spread.probe.trial():
        for action in actions:
            compute(engine, batch.step, batch.micro_batches[0], action, lambda output, tensors: None)
    put_back(before)
    engine.spread.rest()


Buffers = list[tuple[nn.Module, str, Tensor, Tensor]]


def copies(model: nn.Module) -> Buffers:
    """A model's buffers: the module and name of each, and a copy of what it is now."""
    return [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]


@torch.no_grad()
def put_back(before: Buffers) -> None:
    """Undo what a model has changed of its buffers meanwhile, in place or by another tensor."""
    for module, name, buffer, was in before:
        buffer.copy_(was)
        setattr(module, name, buffer)


def compute(
    engine: Engine, step: int, micro: MicroBatch, action: Action, finish: Callable[..., Any],
    more: Mapping[str, Any] | None = None,
) -> Any:  # fmt: skip
    """A stage's forward, every random number in it keyed by step and sample; what ``finish`` makes of the output.

    A stage before the last gives the stream to the next one, and None. ``more``: what the model is called with besides.
    """
    if engine.spread.pipeline is not None:
        engine.clock.begin("wait")
    part = engine.spread.begin(action)
    engine.clock.begin("forward")
    samples = engine.spread.samples
    with micro_batch(engine, step, micro) as tensors, samples.computed():
        try:
            output = call(engine, tensors, more)
            with samples.in_loss():
                part.result = finish(output, tensors)
        except StageEnds as end:
            engine.spread.leave(part, end.stream)
    return part.result


class micro_batch:
    """While a micro-batch is computed: its tensors on the device, its samples known to what draws or normalises."""

    def __init__(self, engine: Engine, step: int, micro: MicroBatch) -> None:
        self.engine, self.step, self.micro = engine, step, micro

    def __enter__(self) -> dict[str, Any]:
        moment = self.engine.spread.moment
        moment.step, moment.slots, moment.real = self.step, self.micro.slots, self.micro.real
        self._generator = None if self.engine.traffic.in_graph else generator_state(self.engine.device)
        self._scope = self.engine.spread.randomness.scope("task")
        self._scope.__enter__()
        tensors = self.engine.to_device(self.micro.tensors)
        tensors.turn = self.engine.take_turn(self.step) if self.engine.spread.model.training else ""
        return tensors

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._scope.__exit__(kind, error, trace)
        if kind is None and self._generator is not None:
            check_unmoved(self._generator, self.engine.device)


def call(engine: Engine, tensors: dict[str, Any], more: Mapping[str, Any] | None = None) -> Any:
    """The model's output for a batch."""
    inputs = cast(engine.task.inputs(tensors), engine.dtypes.compute)
    inputs = {**inputs, **more} if more else inputs
    model = engine.spread.model
    output = called(model, inputs)
    if output is None:
        raise silent(model)
    if engine.spread.context is not None:
        engine.spread.context.share_loss(output)
    return output


def silent(model: nn.Module) -> WrongUse:
    return WrongUse(f"forward of {type(model).__name__} returned nothing. Return what Task.loss needs.")


def _global_count(engine: Engine, own: Loss | None, micro_batches: int) -> float:
    """About how many terms the global batch has, from everybody's first micro-batch."""
    count = counted(own, torch.zeros(2, dtype=torch.float64, device=engine.device))[1]
    if engine.layout.exact:
        count *= engine.mesh.index(*BATCH) == 0  # whoever computes the first virtual micro-batch
    count *= engine.mesh.counts_samples
    summed_over_ranks(engine, count)
    return float(count) * (engine.layout.exact or micro_batches)
