"""Spreading a model: every parallelism applied in one fixed order.

    plan cuts and stages -> describe -> initialise weight by weight, keeping this rank's part and rows
    -> tensor-parallel modules -> experts -> attention over all positions -> batch-norm over the batch axes
    -> every block wrapped: its stage, its sequence shard, its random keys, recompute, probe, compile
    -> shard (gather and let go) -> replicate (sum gradients)

What comes out is a `Spread`: the model to call, and the few operations a training step needs around it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.losses import penalty_factor
from phalanx.parallel.axes import hugging_face
from phalanx.parallel.axes.batchnorm import spread_batchnorm
from phalanx.parallel.axes.context import ContextParallel
from phalanx.parallel.axes.expert import ExpertParallel
from phalanx.parallel.axes.hugging_face_packing import keep_apart
from phalanx.parallel.axes.pipeline import Pipeline, weight_gradient
from phalanx.parallel.axes.rank_local import check_modules
from phalanx.parallel.axes.samples import Samples
from phalanx.parallel.axes.schedules import Action, alone
from phalanx.parallel.axes.tensor import TensorParallel
from phalanx.parallel.axes.transfers import Part
from phalanx.parallel.blocks.assembly import Blocks, cast_inputs
from phalanx.parallel.blocks.boundary import SequenceSharding
from phalanx.parallel.blocks.fp8 import Fp8
from phalanx.parallel.blocks.probe import Probe
from phalanx.parallel.communication.copying import Copying
from phalanx.parallel.communication.memory import Buffers
from phalanx.parallel.communication.mesh import BATCH, EXPERTS, Mesh
from phalanx.parallel.communication.narrow import Narrow
from phalanx.parallel.forward.activations import Activations
from phalanx.parallel.forward.lazy_heads import make_heads_lazy
from phalanx.parallel.randomness.answers import BackwardDraws
from phalanx.parallel.randomness.draws import Moment, Randomness
from phalanx.parallel.torch_private import place_in_memory
from phalanx.parallel.weights import keras
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.parallel.weights.bucket import Bucket, by_size, together
from phalanx.parallel.weights.coming import Coming
from phalanx.parallel.weights.filling import Saved, describe, fill
from phalanx.parallel.weights.gradients import Gradients
from phalanx.parallel.weights.holding import Holding
from phalanx.parallel.weights.outer import OuterWeights
from phalanx.parallel.weights.placement import Placement, StoragePolicy
from phalanx.parallel.weights.replicate import Reduction
from phalanx.parallel.weights.shard import Gathering, ShardedUnit
from phalanx.parallel.weights.storage import Storage
from phalanx.parallel.weights.weight import Weight
from phalanx.parallel.weights.whole import Whole
from phalanx.precision import Dtypes


class Spread:
    """A model spread over a mesh."""

    def __init__(
        self,
        blueprint: Blueprint,
        placement: Placement,
        mesh: Mesh,
        dtypes: Dtypes,
        device: torch.device,
        seed: int,
        saved: Saved | None = None,
    ) -> None:
        """Weights begin as ``saved``, or as the model's constructor made them."""
        anatomy, layout = placement.anatomy, placement.layout
        self.model, self.anatomy, self.layout, self.mesh, self.dtypes, self.device = (
            blueprint.model, anatomy, layout, mesh, dtypes, device,
        )  # fmt: skip
        self.moment, self.activations = Moment(), Activations()
        self.first_step = True
        self.randomness = Randomness(seed, self.moment, device, self.activations, self.model)
        self.state_names = set(self.model.state_dict())
        passing = Buffers(device), Copying(device)
        self.storages = {
            policy: Storage.of(policy, layout, mesh, dtypes.reduce, device, *passing)
            for policy in dict.fromkeys(kept(one.policy) for one in placement.weights.values() if one.policy.axes)
        }
        """By policy. Frozen weights that are kept like those that are trained travel with them."""
        self.placement, self.plan = placement, placement.plan
        self.trainable = {name: one.policy.trainable for name, one in placement.weights.items() if one.policy.axes}
        """Every weight of the model, on any stage, and whether it is trained."""
        self.holding = Holding(placement, mesh)
        self.parts: dict[tuple[int, int], Part] = {}
        """By stage and micro-batch: forwards that a backward will follow."""
        self._reach: dict[int, set[str]] = {}
        self.pipeline: Pipeline | None = None
        stream, self.narrow = Narrow(layout.activations), Narrow(layout.activations)  # between stages; inside of blocks
        if placement.stages is not None:
            self.pipeline = Pipeline(placement.stages, mesh, layout.schedule, self.parts, device, stream)
            self.pipeline.shadows(self.model, dtypes.compute)
        self.probe = Probe(self.model, anatomy, layout, dtypes.compute)
        keras.lead(self.model)
        self.weights = describe(self.model, anatomy, self.holding, self._storage_of, device)
        fill(self.weights, blueprint, saved, self.holding, device, wide=dtypes.compute == torch.float64)
        hugging_face.prepare(self.model, dtypes.compute)
        self.fp8 = Fp8(self.model, placement, dtypes.fp8, device, mesh.world) if dtypes.fp8 else None
        tp = mesh.group("tp")
        self.tensor: TensorParallel | None = None
        if tp.alone:
            make_heads_lazy(self.model, anatomy)
        else:
            self.tensor = TensorParallel(self.plan, self.model, tp, self.randomness, layout, self.narrow)
        if self.fp8 is not None:
            self.fp8.wrap_heads()
        ep = mesh.group(*EXPERTS)
        if not ep.alone:
            ExpertParallel(self.model, anatomy, ep, self.narrow)
        cp = mesh.group("cp")
        self.context: ContextParallel | None = None
        if not cp.alone:
            self.context = ContextParallel(self.model, anatomy, cp, layout.cp_kind, self.randomness, self.narrow)
            hugging_face.reach_attention(self.model, self.context)
        keep_apart(self.model, self.probe.shadows.values(), self.context, dtypes.compute, device)
        self.samples = Samples(mesh.group(*BATCH), self.moment, layout)
        check_modules(self.model, layout)
        spread_batchnorm(self.model, mesh.group(*BATCH), mesh.size(*BATCH), self.moment)
        self.sharding = SequenceSharding(
            self.activations, self.context, tp if self.plan.sequence_parallel else mesh.alone("tp"), device
        )
        self.probe.start(self.model, self.weights, self.holding, self.randomness, self.sharding, self.fp8, self.narrow)
        Blocks(
            self.model, anatomy, layout, self.randomness, self.sharding, self.probe, self.context, self.pipeline
        ).wrap()
        if dtypes.compute != dtypes.parameter:
            cast_inputs(self.model, anatomy, dtypes.compute)
        self._shard_and_replicate()
        if self.pipeline is not None:
            self.pipeline.weights = {place_in_memory(weight.full): weight.full for weight in self.weights.values()}
        if self.pipeline is not None and self.gathering is not None:
            self.gathering.passes = self.pipeline.passes

    def _storage_of(self, name: str) -> Storage:
        return self.storages[kept(self.placement.weights[name].policy)]

    def _shard_and_replicate(self) -> None:
        self.stale = False
        """Shards have changed, and what the model computes with has not: `refresh` is to be called."""
        self.gathering: Gathering | None = None
        self.buckets: list[Bucket] = []
        gathered, kinds, limit = [], self.storages.values(), together(self.placement, self.mesh, self.device)
        for unit in self.anatomy.units:
            for storage in kinds:
                members = [w for name in unit.weights if (w := self.weights.get(name)) and w.storage is storage]
                if members and not storage.always_whole:
                    gathered.append(ShardedUnit(Bucket(unit.name, members, storage), unit))
        if gathered:
            self.gathering = Gathering(self.model, gathered)
            self.buckets = [item.bucket for item in reversed(gathered)]
        for storage in kinds:
            whole = [weight for weight in self.weights.values() if weight.storage is storage and storage.always_whole]
            self.buckets += [
                Bucket(f"bucket {i}", part, storage) for i, part in enumerate(by_size(whole, limit)) if part
            ]
        self.whole = Whole(
            self.model, self.buckets, self.holding, self.trainable, self.dtypes.reduce, self.device, self.state_names
        )
        self.outer: OuterWeights | None = None
        """What sites have agreed on, where each trains by itself."""
        like = torch.empty(0, dtype=self.dtypes.reduce, device=self.device)
        self.gradients = Gradients(self.buckets, self.holding, self.mesh, like)
        self.reduction = Reduction(self.buckets, self.mesh.group("dp"), self.gathering)
        self.coming = Coming(self.model, self.anatomy.units, self.buckets, [*self.weights], self.device)
        self._gather_whole()
        self.settle()
        self._modules = list(self.model.modules())
        self._modes: tuple[bool, ...] | None = None
        """Whether each was in training mode after the last call of ``model.train()``."""
        self._trained = frozenset(name for name, weight in self.weights.items() if weight.trainable)
        self._refused_if_written = [weight for weight in self.weights.values() if not weight.trainable]
        for weight in self.weights.values():
            weight.note_version()

    def train(self) -> None:
        """Call ``model.train()`` where it has not been called since modules last changed their mode, as a loop would.

        A model may do something else there than have all of its modules in training mode, as keep a backbone in
        evaluation mode: it is asked once, and again where somebody has changed what it left.
        """
        modes = tuple(map(attrgetter("training"), self._modules))
        if modes != self._modes:
            self.model.train()
            self._modes = tuple(map(attrgetter("training"), self._modules))

    def actions(self, micro_batches: int) -> Sequence[Action]:
        """What this rank does in a step, in order."""
        return alone(micro_batches) if self.pipeline is None else self.pipeline.actions(micro_batches)

    def forwards(self, micro_batches: int) -> Sequence[Action]:
        """What this rank does in an evaluation, in order."""
        if self.pipeline is not None:
            return self.pipeline.forwards(micro_batches)
        return [Action("forward", 0, micro) for micro in range(micro_batches)]

    def gives_loss(self, action: Action) -> bool:
        return self.pipeline is None or action.stage == self.pipeline.stages.last

    def from_last_stage(self, words: list[str]) -> list[str]:
        """What the last stage has to say, on all stages."""
        group = self.mesh.group("pp")
        return group.broadcast_words(words, self.mesh.size("pp") - 1)

    def start(self, micro_batches: Sequence[Any], actions: Sequence[Action]) -> None:
        """Before the first action of a step, or of an evaluation."""
        if self.pipeline is not None:
            self.pipeline.start(micro_batches, actions)

    def begin(self, action: Action) -> Part:
        """Begin a forward: a stage's part of a micro-batch."""
        self._turn_to(action)
        part = Part(action.stage, action.micro)
        if torch.is_grad_enabled():
            self.parts[action.stage, action.micro] = part
        if self.pipeline is not None:
            self.pipeline.enter(part, action)
        return part

    def leave(self, part: Part, stream: Tensor) -> None:
        """End a forward before the last stage."""
        assert self.pipeline is not None
        self.pipeline.leave(part, stream)
        if self.gathering is not None:
            self.gathering.left(stream)

    def _turn_to(self, action: Action) -> None:
        if self.gathering is not None:
            self.gathering.begin((action.stage, action.micro))

    def nears_loss(self, action: Action) -> bool:
        """Whether a rank's last stage computes, after which the loss is known before any backward."""
        return self.pipeline is None or action.stage + self.pipeline.stages.ranks > self.pipeline.stages.last

    def backward(self, action: Action, factor: float, last: bool, hold: bool = False) -> None:
        """Backward of what a forward made; the gradients of its weights join the step's, unless on ``hold``."""
        self._turn_to(action)
        part = self.parts.pop((action.stage, action.micro))
        split = self.pipeline is not None and self.pipeline.name == "zb"
        self.reduction.start_backward(last, self._reached(action), hold=split or hold)
        with penalty_factor(factor), self._refusing_draws():
            if self.pipeline is None:
                (part.result.total * factor).backward()
            else:
                self.pipeline.backward(part, action, factor)

    def _refusing_draws(self) -> AbstractContextManager[Any]:
        """In the first step, draws in a backward: what they do in one step they do in all.

        A graph that is recorded or compiled cannot be looked into.
        """
        plain = self.layout.compile == "none" and self.layout.graphs == "none"
        return BackwardDraws(self.randomness) if plain and self.first_step else nullcontext()

    @torch.no_grad()
    def backward_weights(self, action: Action, last: bool) -> None:
        """What a schedule has left of a backward: the gradients of weights alone."""
        assert self.pipeline is not None
        self._turn_to(action)
        for weight, input, gradient in self.pipeline.deferred(action):
            self.reduction.deposit(weight, weight_gradient(input, gradient))
        self.reduction.start_backward(last, self._reached(action))

    def _reached(self, action: Action) -> Callable[[str], bool] | None:
        """Which weights a stage's backward may reach."""
        if self.pipeline is None:
            return None
        if action.stage not in self._reach:  # found once: it is asked for every weight in every backward
            others = tuple(
                f"{b}." for b in {*self.anatomy.blocks}.difference(self.pipeline.stages.blocks[action.stage])
            )
            self._reach[action.stage] = {name for name in self.weights if not name.startswith(others)}
        return self._reach[action.stage].__contains__

    def shards(self) -> list[nn.Parameter]:
        """What the optimizer updates on this rank: its rows of every trainable weight."""
        return [weight.shard for weight in self.weights.values() if weight.trainable]

    def complete_gradients(self) -> None:
        """After the last action: they are those of the global batch."""
        if self.pipeline is not None:
            self.pipeline.finish()
        self.settle()
        self.gradients.complete()

    def untouched(self) -> list[str]:
        """Trainable weights that got no gradient on this rank in this step."""
        if self.reduction.touched >= self._trained:
            return []
        return [name for name in self.weights if name in self._trained and name not in self.reduction.touched]

    def updated(self, copied: Set[str] = frozenset()) -> None:
        """The shards have changed: make what the model computes with agree, and let their gradients go.

        Weights that stay whole are on their way when this returns, and whoever reads one waits for it (`coming`).
        ``copied``: names of weights of which it does already, where a rank has all of them.
        """
        self.settle()
        for weight in self._refused_if_written:
            weight.check_unwritten()
        for weight in self.weights.values():
            weight.shard.grad = None
        if self.gathering is not None:
            self.gathering.rest()
        self._gather_whole(copied)
        self.stale = False

    def end_step(self, counts: bool, factor: float = 1.0, without: Set[str] = frozenset()) -> None:
        """What a step has found out is used from the next one on, unless it is left out.

        ``factor``: by which gradients will be larger, as the loss's scale has changed. ``without``: not updated by it.
        """
        self.reduction.end_step(counts, factor, without)
        self.first_step = False
        if self.fp8 is not None:
            self.fp8.advance() if counts else self.fp8.forget()
        if not self.randomness.asked:
            self.randomness.answers, self.randomness.may_draw = None, False  # from now on it is only watched

    def scales(self) -> dict[str, Any] | None:
        """What linears in 8 bits go on with after a resume."""
        return None if self.fp8 is None else self.fp8.state()

    def restore_scales(self, scales: dict[str, Any] | None) -> None:
        if self.fp8 is not None:
            self.fp8.restore(scales or {})

    def refresh(self) -> None:
        """Where shards have changed and nobody said so to all ranks: say so now, on all of them."""
        if self.stale:
            self.updated()

    def settle(self) -> None:
        """Wait for weights that are on their way."""
        self.coming.settle()

    def close(self) -> None:
        """Let go of what others hold on to, or wait for."""
        self.reduction.close()
        if sys.exc_info()[0] is None:  # after a failure, ranks that it would wait for may be gone
            self.settle()

    def _gather_whole(self, copied: Set[str] = frozenset()) -> None:
        """Begin to make weights that stay whole from the rows that ranks own."""

        def agrees(weight: Weight) -> bool:
            return weight.in_use or (weight.storage.copies and weight.name in copied)

        self.coming.start([b for b in self.buckets if b.storage.always_whole and not all(map(agrees, b.weights))])

    def rest(self) -> None:
        """After an evaluation: let go of weights that it left whole."""
        if self.pipeline is not None:
            self.pipeline.finish()
        if self.gathering is not None:
            self.gathering.rest()


def kept(policy: StoragePolicy) -> StoragePolicy:
    """The same whether what is kept so is trained or not."""
    return replace(policy, trainable=False)
