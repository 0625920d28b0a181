"""A record of one step on one rank: what modules gave and got back, what was drawn, what each backward made.

Taken only when a proof has failed, to say where. Each tensor goes with where it lies in what one device would have:
which slots of the batch, which positions, which features.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.callbacks import Callback
from phalanx.data.loader import StepBatch
from phalanx.logits import Logits
from phalanx.losses import penalty_factor
from phalanx.parallel.axes.cuts import Cut, Span
from phalanx.parallel.randomness.draws import Randomness
from phalanx.parallel.weights.shard import ReshardedWeight
from phalanx.prove.ranks.pieces import Piece, times_here
from phalanx.prove.reference.hostile import Hostile
from phalanx.prove.reference.loop import Reference, as_moment
from phalanx.task import Task
from phalanx.train.engine import Engine
from phalanx.train.step import Metrics

WHOLE = "the model"
"""What the outermost module is called."""


@dataclass
class Record:
    """One step of one rank."""

    rank: int
    coordinates: dict[str, int]
    activations: dict[str, list[Piece]] = field(default_factory=dict)
    backward: dict[str, list[Piece]] = field(default_factory=dict)
    draws: dict[str, list[Piece]] = field(default_factory=dict)
    own: dict[str, list[Tensor]] = field(default_factory=dict)
    """By weight, what each backward of this rank made: of the whole weight, or of the part that it computes with."""
    summed: dict[str, Tensor] = field(default_factory=dict)
    """By weight, this rank's rows after the sum over ranks, divided by the count."""
    rows: dict[str, tuple[Cut | None, int, int, int]] = field(default_factory=dict)
    """By weight, how it is cut, which part and which rows of that part are here."""
    state: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    """By rung and name, what this rank held: gradients as given, moments, weights, buffers."""
    used: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """By module, its own weights when it was called, under their names."""
    slots: list[np.ndarray] = field(default_factory=list)
    """By micro-batch of this rank."""


def tensor_of(output: Any) -> Tensor | None:
    """The stream among what a module gives, or the last hidden state of logits that were not made."""
    if isinstance(output, (tuple, list)) and output:
        output = output[0]
    if isinstance(output, Logits):
        output = output.hidden
    return output if isinstance(output, Tensor) and output.is_floating_point() and not output.is_meta else None


def visited(visits: Counter[tuple[int, str]], slots: np.ndarray, name: str) -> str:
    """A module's name and, from its second call for the same samples on, the number of the call."""
    visits[int(slots[0]), name] += 1
    number = visits[int(slots[0]), name]
    return name if number == 1 else f"{name} (call {number})"


def bare(name: str) -> str:
    """A module's own name, without the number of its call."""
    return name.partition(" (")[0]


def module_named(model: nn.Module, name: str) -> nn.Module:
    return model if bare(name) == WHOLE else model.get_submodule(bare(name))


def observe(model: nn.Module, see: Callable[[str, Tensor], Callable[[Tensor], None] | None]) -> None:
    """Have ``see`` told, module by module as they end, what each gave; what it returns is told the gradient of that."""

    def ended(name: str, module: nn.Module, args: Any, output: Any) -> None:
        tensor = tensor_of(output)
        name = f"{name} (hidden)" if isinstance(output, Logits) else name
        back = None if tensor is None else see(name, tensor)
        if tensor is not None and back is not None and tensor.requires_grad:
            tensor.register_hook(back)

    for name, module in model.named_modules():
        module.register_forward_hook(partial(ended, name or WHOLE))


def observe_draws(randomness: Randomness, see: Callable[[str, Tensor], None]) -> None:
    """Have ``see`` told every random draw, by scope and number."""
    plain = randomness.draw

    def draw(shape: torch.Size, values: Any, like: Tensor | None = None) -> Tensor:
        drawn = plain(shape, values, like)
        if not drawn.is_meta and not isinstance(like, nn.Parameter):
            see(f"draw {randomness.calls} of {randomness.name}", drawn.double())
        return drawn

    randomness.draw = draw  # type: ignore[method-assign]


class Recorder(Callback):
    """Watches one engine, and records one of its steps."""

    def __init__(self, engine: Engine, step: int) -> None:
        self.engine, self.step = engine, step
        self.record = Record(engine.environment.rank, dict(engine.mesh.coordinates))
        self.moment, self.randomness = engine.spread.moment, engine.spread.randomness
        self._visits: Counter[tuple[int, str]] = Counter()
        for name, weight in engine.spread.weights.items():
            holding = engine.spread.holding
            self.record.rows[name] = holding.cut(name), holding.index(name), weight.first, weight.last
        observe(engine.spread.model, self._see)
        observe_draws(self.randomness, self._draw)
        engine.spread.reduction.on_gradient = self._own
        engine.callbacks.add(self)
        engine.optimizer.register_step_pre_hook(self._given)
        for name, module in engine.spread.model.named_modules():
            module.register_forward_pre_hook(partial(self._called, name or WHOLE))
        for name, whole in engine.spread.whole.state():
            self.record.state["initial weights", name] = whole.clone()
        for name, buffer in engine.spread.model.named_buffers():
            self.record.state["initial weights", name] = buffer.clone()

    def _called(self, name: str, module: nn.Module, args: Any) -> None:
        if name == WHOLE and self._now and self.moment.recomputing:
            self._begin_again()
        if not self._passes(name) and name not in self.record.used:
            own = [(n, p) for n, p in module.named_parameters(recurse=False) if not isinstance(p, ReshardedWeight)]
            tied, prefix = self.engine.anatomy.tied, "" if name == WHOLE else f"{name}."
            used = {tied.get(prefix + n, prefix + n): p.detach().clone() for n, p in own}
            self.record.used[name] = used

    def _begin_again(self) -> None:
        """The whole model runs once more before a step: what was seen until now belongs to one that was given up."""
        self._visits.clear()
        for seen in (self.record.activations, self.record.backward, self.record.draws, self.record.own):
            seen.clear()

    def _given(self, *_: Any) -> None:
        if self._now:
            for name, weight in self.engine.spread.weights.items():
                if weight.shard.grad is not None:
                    self.record.state["given gradients", name] = weight.shard.grad.detach().clone()

    @property
    def _now(self) -> bool:
        return self.engine.step_number == self.step

    def _passes(self, name: str) -> bool:
        pipeline = self.engine.spread.pipeline
        hidden = pipeline is not None and pipeline.passes(name)
        return hidden or not self._now or not self.moment.real or self.moment.recomputing

    def _piece(self, name: str, tensor: Tensor) -> Piece:
        return Piece(
            tensor.detach().clone(), self.moment.slots.copy(), times_here(self.engine), list(self._features(name))
        )

    def _features(self, name: str) -> Iterator[tuple[Span, ...]]:
        plan, index = self.engine.spread.plan, self.engine.mesh.index("tp")
        cut = plan.cuts.get(f"{name}.weight")
        if name in plan.columns and cut is not None:
            yield cut.spans[index]
        for container in plan.containers.values():
            if name.startswith(container.name + "."):
                yield (container.features[index],)

    def _see(self, name: str, tensor: Tensor) -> Callable[[Tensor], None] | None:
        pipeline = self.engine.spread.pipeline
        if self._passes(name) or (pipeline is not None and pipeline.absent(tensor)):
            return None
        piece = self._piece(name, tensor)
        name = visited(self._visits, self.moment.slots, name)
        self.record.activations.setdefault(name, []).append(piece)
        gradients = self.record.backward.setdefault(name, [])
        return lambda gradient: gradients.append(replace(piece, tensor=gradient.detach().clone()))

    def _draw(self, name: str, drawn: Tensor) -> None:
        if self._now and self.moment.real and not self.moment.recomputing:
            layout = self.randomness.activations.layout
            piece = self._piece("", drawn)
            if layout.time is not None:
                piece.times = [layout.time]
            if layout.features is not None:
                piece.features = [((int(layout.features[0]), int(layout.features[-1]) + 1),)]
            if layout.heads is None:
                self.record.draws.setdefault(name, []).append(piece)

    def _own(self, name: str, gradient: Tensor) -> None:
        if self._now:
            self.record.own.setdefault(name, []).append(gradient.detach().clone())

    def on_gradients(self, engine: Engine, divisor: float, without: set[str]) -> None:
        if not self._now:
            return
        for bucket in self.engine.spread.buckets:
            for weight in bucket.trainable:
                own = bucket.gradient_own(weight).detach()
                self.record.summed[weight.name] = own * (self.engine.loss_scale.value / divisor)

    def before(self, batch: StepBatch) -> None:
        """A step begins."""
        if self._now:
            self.record.slots = [micro.slots for micro in batch.micro_batches if micro.real]

    def after(self, batch: StepBatch, metrics: Metrics) -> None:
        """A step is over."""
        if batch.step == self.step:
            for name, weight in self.engine.spread.weights.items():
                self.record.state["weights", name] = weight.shard.detach().clone()
                for moment, value in self.engine.optimizer.state.get(weight.optimized, {}).items():
                    if (kept := as_moment(value)) is not None:
                        self.record.state["moments", f"{name} {moment}"] = kept.clone()
                if weight.full.numel() and weight.storage.always_whole:
                    self.record.state["weights in use", name] = weight.full.detach().clone()
            for name, buffer in self.engine.spread.model.named_buffers():
                self.record.state["buffers", name] = buffer.clone()

    def finish(self) -> Record:
        return self.record


@dataclass
class WholeStep:
    """One step of one device, and the reference as it was before it."""

    reference: Reference
    activations: dict[str, Tensor] = field(default_factory=dict)
    backward: dict[str, Tensor] = field(default_factory=dict)
    draws: dict[str, Tensor] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        return len(self.reference.steps[-1].ids)

    @classmethod
    def of(
        cls,
        task: Task,
        micro_batches: int,
        step: int,
        weights: Mapping[str, Tensor] | None = None,
        penalties: float = 1.0,
    ) -> WholeStep:
        """Step number ``step``, with other ``weights`` if they are given, and penalties so many times."""
        assert isinstance(task, Hostile)
        recording = False
        visits: Counter[tuple[int, str]] = Counter()
        found: dict[str, dict[str, list[Tensor]]] = {"activations": {}, "draws": {}}
        back: dict[str, list[Tensor | None]] = {}

        def see(name: str, tensor: Tensor) -> Callable[[Tensor], None] | None:
            if not recording:
                return None
            name = visited(visits, task.proof_trial.moment.slots, name)
            found["activations"].setdefault(name, []).append(tensor.detach().clone())
            gradients = back.setdefault(name, [])
            place = len(gradients)  # backward may come to the last micro-batch first
            gradients.append(None)
            return lambda gradient: gradients.__setitem__(place, gradient.detach().clone())

        def see_draw(name: str, drawn: Tensor) -> None:
            if recording:
                found["draws"].setdefault(name, []).append(drawn)

        def attach(model: nn.Module, randomness: Randomness) -> None:
            observe(model, see)
            observe_draws(randomness, see_draw)

        reference = Reference(task, micro_batches, observe=attach).run(step)
        for name, weight in (weights or {}).items():
            reference.parameters[name].data.copy_(weight)
        recording = True
        with penalty_factor(penalties):
            reference.run(1)
        backward = {name: [g for g in gradients if g is not None] for name, gradients in back.items()}
        kinds = {**found, "backward": backward}
        return cls(reference, **{kind: {n: _joined(t) for n, t in by.items() if t} for kind, by in kinds.items()})


def _joined(parts: list[Tensor]) -> Tensor:
    """What micro-batches gave one after another."""
    alike = all(part.ndim and part.shape[1:] == parts[0].shape[1:] for part in parts)
    return torch.cat(parts) if alike else parts[0]


def by_axis(records: Sequence[Record], rank: int, axes: Sequence[str]) -> list[Record]:
    """The records of ranks that differ from one along these axes alone."""
    own = next(record for record in records if record.rank == rank)
    kept = [axis for axis in own.coordinates if axis not in axes]
    return [r for r in records if all(r.coordinates[axis] == own.coordinates[axis] for axis in kept)]
