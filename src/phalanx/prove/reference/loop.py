"""The reference: a task on one device, in float64, by a plain loop.

It shares with a spread run the task, the initial weights, the order of the data and the keys of random draws, which are
pure functions, and nothing of meshes, buckets, shards, collectives or the training step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phalanx import counter, gathering
from phalanx.anatomy import Anatomy
from phalanx.data.order import Order, digest, share
from phalanx.data.seeding import seed_globally
from phalanx.loss import Loss
from phalanx.parallel.axes import batchnorm, hugging_face
from phalanx.parallel.forward.wrapper import wrap
from phalanx.parallel.randomness.answers import Answers
from phalanx.parallel.randomness.draws import Moment, RandomKeys, Randomness
from phalanx.parallel.randomness.torch_checkpoint import RunOnce
from phalanx.parallel.weights import keras
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.parameters import building, settings_of
from phalanx.precision import cast
from phalanx.prove.reference.beforehand import known_beforehand
from phalanx.prove.reference.coded import Coded, Plain
from phalanx.prove.reference.evaluation import Measures, measured
from phalanx.prove.reference.hostile import Hostile, wide_batch
from phalanx.prove.reference.one_step import State, Step
from phalanx.prove.reference.steady import Decisions, Idle, Steady
from phalanx.prove.reference.together import losses_together
from phalanx.task import Batch, Task, as_loss, called, rates
from phalanx.train.calling import made_callbacks
from phalanx.train.optimizers import make_optimizer
from phalanx.train.parameter_groups import frozen_first
from phalanx.train.turns import Turns

Slots = tuple[int, int]
NONE = torch.zeros(0, dtype=torch.float64)


@dataclass(frozen=True)
class Beginning:
    """What every run of a task begins with: found once, since a constructor may be slow."""

    anatomy: Anatomy
    weights: State
    buffers: State
    """Those that are drawn; others are what the constructor itself computes."""

    @classmethod
    def of(cls, task: Task) -> Beginning:
        blueprint = Blueprint(building(task), task.seed)
        once, again = (dict(_made(task, stream).named_buffers()) for stream in ("reference", "another"))
        drawn = [n for n, b in blueprint.model.named_buffers() if not torch.equal(once[n], again[n])]
        weights = {name: blueprint.value(weight, "cpu") for name, weight in blueprint.model.named_parameters()}
        buffers = {name: blueprint.value(blueprint.model.get_buffer(name), "cpu") for name in drawn}
        return cls(task.anatomy(blueprint.model), weights, buffers)


Observe = Callable[[nn.Module, Randomness], None]


class Reference:
    """A task's run on one device, as far as it has come."""

    def __init__(
        self,
        task: Task,
        micro_batches: int = 1,
        nudge: int = 0,
        observe: Observe | None = None,
        decisions: Decisions | None = None,
        coded: Coded | None = None,
        own: Callable[[Order, np.ndarray], list[Slots]] | None = None,
    ) -> None:
        """With ``nudge``, every weight begins one rounding off, up or down as that seed draws.

        Choices are made as ``decisions`` say; without any they are recorded. ``coded``: gradients are summed so.
        ``own``: which slots of a step with these samples it trains on, if not on all.
        """
        assert isinstance(task, Hostile)
        self.task, self.micro_batches, self.coded, self._own = task, micro_batches, coded, own
        self._make_model(task, nudge)
        self.moment = task.proof_trial.moment = Moment()
        self.randomness = Randomness(task.seed, self.moment, torch.device("cpu"), model=self.model)
        self._key_randomness(task, decisions)
        self.trained = {n: p for n, p in self.parameters.items() if p.requires_grad}
        self.optimizer = make_optimizer(task, list(self.trained.values()), bool(self.trained))
        self.schedule = rates(task)
        callbacks = made_callbacks(task)
        for callback in callbacks:
            callback.on_model(list(self.trained))
        self.turns = Turns(task, dict.fromkeys(self.trained, True), [*callbacks, *frozen_first(self.trained)])
        seed_globally(task.seed, "data")
        self.data: Any = task.data()
        self.order = task.proof_order
        self.known = known_beforehand(self)
        """Of held-out samples, what the task wants to know of them before the first step."""
        self.steps: list[Step] = []
        self.gathers, self.sums, self.uneven = False, False, False
        """Whether the loss has gathered samples; was a sum of several losses; and of some with different counts."""
        self.evaluation: Measures | None = None
        """Before the last step, of held-out data."""
        self._called: set[str] = set()
        self._note_calls()
        if observe is not None:
            observe(self.model, self.randomness)

    def _note_calls(self) -> None:
        """Note which modules a step calls, of those that ranks cannot compute without messages."""
        norms = [name for name, module in self.model.named_modules() if isinstance(module, batchnorm.KINDS)]
        for name in {*self.anatomy.blocks, *self.anatomy.experts, *self.anatomy.splits, *norms}:
            self.model.get_submodule(name).register_forward_pre_hook(partial(self._note_call, name))

    def _note_call(self, name: str, module: Any, given: Any) -> None:
        own_statistics = not isinstance(module, batchnorm.KINDS) or module.training or module.running_mean is None
        if own_statistics:
            self._called.add(name)

    def _make_model(self, task: Hostile, nudge: int) -> None:
        """The model in float64, with the weights and buffers that every run begins with."""
        beginning = task.proof_trial.beginning = task.proof_trial.beginning or Beginning.of(task)
        self.model, self.anatomy = _made(task, "reference"), beginning.anatomy
        for name, buffer in self.model.named_buffers():
            if name in beginning.buffers:
                buffer.copy_(beginning.buffers[name])
        self.model.double()
        hugging_face.prepare(self.model, torch.float64)
        self.parameters = dict(self.model.named_parameters())
        for name, weight in self.parameters.items():
            weight.data.copy_(beginning.weights[name])
            weight.logical_name = name  # type: ignore[attr-defined]
            if nudge and weight.is_floating_point():
                weight.data.mul_(1 + _signs(weight, nudge, name) * torch.finfo(weight.dtype).eps)
        self.initial = self.weights()
        tied = {n for n, _ in self.model.named_parameters(remove_duplicate=False)} - set(self.parameters)
        self.saved = frozenset(self.model.state_dict()) - tied
        self.initial_buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def _key_randomness(self, task: Hostile, decisions: Decisions | None) -> None:
        """Have draws follow from their keys, and choices from ``decisions``, if there are any."""
        idle = Idle.of(task.proof_trial.idle, self.model, self.anatomy.experts)
        self.decisions = Decisions(idle=idle) if decisions is None else decisions
        times = None if decisions is None else list[Tensor]
        steady = Steady(self.randomness, self.decisions, lambda step: self.order.slots(step), times)
        self.randomness.answers = Answers(self.randomness, steady.answers)
        self.randomness.checkpointing = RunOnce()
        for name in self.anatomy.blocks:
            wrap(self.model.get_submodule(name), RandomKeys(name, self.randomness))

    @property
    def couples_samples(self) -> bool:
        """Whether it matters which samples are computed together: to a batch-norm, or a buffer that calls change."""
        changed = [
            name
            for step in self.steps
            for name, buffer in step.buffers.items()
            if not torch.equal(buffer, self.initial_buffers[name])
        ]
        return bool(changed) or any(isinstance(module, batchnorm.KINDS) for module in self.model.modules())

    @property
    def at_once(self) -> bool:
        """Whether the loss needs all samples of a step at the same time."""
        return self.gathers or self.uneven

    def run(self, steps: int | None = None) -> Reference:
        """Train to the end of the trial, or so many steps more."""
        stop = self.task.steps if steps is None else len(self.steps) + steps
        while len(self.steps) < stop:
            if len(self.steps) == self.task.steps - 1:  # so that a step also shows what an evaluation leaves behind
                with self._computing():
                    self.evaluation = measured(self)
            self.steps.append(self.step(len(self.steps)))
        return self

    def step(self, number: int) -> Step:
        order = self.order
        ids = order.ids(number)
        step = Step(ids, [], samples=digest(ids))
        self.model.train()
        self._called = step.called
        with self._computing():
            if self._own is not None:
                step.read = [(-1, "")] * len(ids)
                for slots in filter(lambda slots: slots[0] < slots[1], self._own(order, ids)):
                    self._backward(step, number, slots)
            elif self.coded is None:
                each = order.micro_batches(len(ids), self.micro_batches)
                ranges = share(len(ids), each, 1, 0, order.tokens(ids))
                if self.task.proof_trial.together and len(ranges) > 1:
                    self._backward_together(step, number, ranges)
                else:
                    for slots in ranges:
                        self._backward(step, number, slots)
            else:
                self._backward_coded(step, number, self.coded)
        divisor, step.terms = step.count or 1.0, step.count
        for name, weight in self.trained.items():
            step.gradients[name] = None if weight.grad is None else weight.grad.to_dense() / divisor
        step.norm = float(torch.cat([*(g.flatten() for g in step.gradients.values() if g is not None), NONE]).norm())
        step.skipped = not math.isfinite(step.norm) or not math.isfinite(step.total) or step.count <= 0
        self._clip(step)
        factor = self.schedule(number)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (group["rate"](number) if "rate" in group else factor)
        if not step.skipped:
            for name, weight in self.trained.items():
                weight.grad = step.clipped(name)
            (self.coded or Plain()).update(self.optimizer, self.trained, step.factors, step.count)
        for weight in self.trained.values():  # those in no group of the optimizer, too
            weight.grad = None
        if self.coded is not None:
            self.coded.end_step(not step.skipped, {name for name, own in step.gradients.items() if own is None})
        step.options = options(self.optimizer)
        step.moments = {name: self.moments(weight) for name, weight in self.trained.items()}
        step.weights, step.buffers = self.weights(), {n: b.clone() for n, b in self.model.named_buffers()}
        step.in_use = None if self.coded is None else self.coded.gathered(step.weights)
        return step

    def _clip(self, step: Step) -> None:
        """The factor for each weight's gradient: by the norm of all, or of those that share a limit of their own."""
        together: dict[str, list[str]] = {"": []}
        for name, weight in self.trained.items():
            together.setdefault(settings_of(weight).clipped_with, []).append(name)
        for pattern, names in together.items():
            limit = settings_of(self.trained[names[0]]).clip if pattern else self.task.clip
            present = [g.flatten() for name in names if (g := step.gradients[name]) is not None]
            norm = float(torch.cat(present).norm()) if present else 0.0
            factor = min(1.0, float(limit or 0) / (norm + 1e-6))
            step.factors |= dict.fromkeys(names, factor)
            if not pattern:
                step.clip_factor = factor

    def _computing(self) -> AbstractContextManager[None]:
        """While this lasts, weights are as ranks compute with them."""
        return nullcontext() if self.coded is None else self.coded.computing(self.parameters)

    def _backward(self, step: Step, number: int, slots: tuple[int, int]) -> None:
        """Add the gradients of some slots to those of the step."""
        batch, step.read[slice(*slots)] = self.batch(number, np.arange(*slots))
        total, count = self.loss(number, np.arange(*slots), batch)
        total.backward()
        step.total, step.count = step.total + total.item(), step.count + count

    def _backward_together(self, step: Step, number: int, ranges: Sequence[Slots]) -> None:
        """The same of all micro-batches at once: what the model gives for each, and then their losses."""
        losses = []
        self.turns.take(number, self.trained)
        for first, last in ranges:
            slots = np.arange(first, last)
            batch, step.read[first:last] = self.batch(number, slots)
            with self.randomness.scope("task"):
                output = self.output(number, slots, batch)
                losses.append((slots, partial(self._loss_of, number, slots, output, batch, self.randomness.calls)))
        found = losses_together(losses)
        sum((loss.total for loss in found), NONE.sum()).backward()
        step.total = sum(loss.total.item() for loss in found)
        step.count = sum(float(loss.count or 0) for loss in found)

    def _loss_of(self, number: int, slots: np.ndarray, output: Any, batch: Batch, calls: int) -> Loss:
        """What the task makes of the model's output, after so many draws."""
        self.moment.step, self.moment.slots = number, slots
        with self.randomness.scope("task"):
            self.randomness.calls = calls
            return as_loss(self.task.loss(output, batch), self.task)

    def _backward_coded(self, step: Step, number: int, coded: Coded) -> None:
        """Have the gradients of each sender, and their sums as ranks make them."""
        coded.begin(number, self.optimizer, self.trained)
        step.read = [(-1, "")] * len(step.ids)
        sums: dict[str, Tensor] = {}
        touched: set[str] = set()
        for turn in coded.turns(self.order, step.ids):
            every = []
            for ranges in turn:
                for slots in filter(lambda slots: slots[0] < slots[1], ranges):
                    self._backward(step, number, slots)
                own = {n: torch.zeros_like(w) if w.grad is None else w.grad.to_dense() for n, w in self.trained.items()}
                touched |= {name for name, weight in self.trained.items() if weight.grad is not None}
                every.append(own)
                for weight in self.trained.values():
                    weight.grad = None
            for name, total in coded.sum(every).items():
                sums[name] = total if name not in sums else sums[name] + total
        for name in touched:
            self.trained[name].grad = sums[name].detach()

    def batch(self, step: int, slots: np.ndarray) -> tuple[Batch, list[tuple[int, str]]]:
        """The samples in these slots as a batch of float64, and what was read for it."""
        self.data.read.clear()
        made = wide_batch(self.task, self.data, self.order.ids(step)[slots], self.order.visits(step, slots))
        made.turn = self.task.turn(step)
        return made, list(self.data.read)

    def output(self, step: int, slots: np.ndarray, batch: Batch) -> Any:
        """The model's output. To be called in the scope of `randomness`."""
        self.moment.step, self.moment.slots = step, slots
        inputs = cast(self.task.inputs(batch), torch.float64)  # a task may make some itself
        return called(self.model, inputs)

    def loss(self, step: int, slots: np.ndarray, batch: Batch) -> tuple[Tensor, float]:
        """A batch's total and count."""
        before = gathering.calls
        self.turns.take(step, self.trained)
        with self.randomness.scope("task"):
            loss = as_loss(self.task.loss(self.output(step, slots, batch), batch), self.task)
        counts = {float(part.count or 0) for part in loss.parts.values()}
        self.gathers |= gathering.calls > before
        self.sums |= bool(counts)
        self.uneven |= len(counts) > 1
        return loss.total, float(loss.count or 0)

    def gradients_by_slot(self, number: int) -> Iterator[State]:
        """Of each sample's own total, alone, with the weights that there are now."""
        for slot in range(self.order.slots(number)):
            own = np.array([slot])
            total, _ = self.loss(number, own, self.batch(number, own)[0])
            total.backward()
            yield {n: torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for n, p in self.trained.items()}
            for weight in self.trained.values():
                weight.grad = None

    def moments(self, weight: nn.Parameter) -> State:
        """What the optimizer keeps of a weight; nothing of one without elements, of which checkpoints have none."""
        held = self.optimizer.state.get(weight, {}) if weight.numel() else {}
        return {n: value.clone() for n, v in held.items() if (value := as_moment(v)) is not None}

    def weights(self) -> State:
        """As they are now."""
        return {name: weight.detach().clone() for name, weight in self.parameters.items()}


def as_moment(value: Any) -> Tensor | None:
    """What an optimizer keeps of a weight, if it is numbers."""
    return torch.as_tensor(value) if isinstance(value, (Tensor, int, float)) else None


def options(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """By weight, the numbers that its group has, but for those that choose between kernels."""
    plain = (int, float, tuple, type(None))
    return {
        weight.logical_name: {n: v for n, v in group.items() if isinstance(v, plain) and n not in ("fused", "foreach")}
        for group in optimizer.param_groups
        for weight in group["params"]
    }


def _made(task: Task, stream: str) -> nn.Module:
    seed_globally(task.seed, stream)
    return keras.build(building(task), task.seed)


def _signs(weight: Tensor, nudge: int, name: str) -> Tensor:
    source = np.random.default_rng(counter.key(nudge, name) & 0xFFFFFFFF)
    return torch.from_numpy(source.choice([-1.0, 1.0], size=tuple(weight.shape)))
