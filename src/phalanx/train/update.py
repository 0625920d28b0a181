"""A step's update: gradients are scaled and given to the optimizer; on a GPU Adam's is one pass over memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn, optim

from phalanx import adamw
from phalanx.adamw import AdamW
from phalanx.comm import Comm
from phalanx.kernels.adamw import KERNEL, Hyperparameters, OnePass, Segment, Updated
from phalanx.kernels.moments import DTYPES
from phalanx.parallel.spread import Spread
from phalanx.parallel.torch_private import add_to_each, has_step_hooks, version, versions
from phalanx.parallel.weights.boxes import segments
from phalanx.parallel.weights.weight import Weight
from phalanx.train.agreement import settle
from phalanx.train.frozen_variance import FrozenVariance
from phalanx.train.streaming import Homes, StreamedPass

KEPT = "exp_avg", "exp_avg_sq", "step"
NONE: Mapping[str, float] = {}


class Lot:
    """Weights of one of the optimizer's groups that have been updated as often."""

    def __init__(
        self, group: int, step: int, shards: Sequence[nn.Parameter], updated: Sequence[Updated],
        states: Sequence[dict[str, Any]], launch: Callable[[Hyperparameters, float], None],
    ) -> None:  # fmt: skip
        """``step``: the next is their so-manyth. ``states``: what the optimizer keeps of each."""
        self.group, self.step, self.shards, self.launch = group, step, shards, launch
        self._states, self._kept = states, [*self._what_is_kept(states)]
        self.counts = self._kept[-len(shards) :]
        self._versions = versions(self.counts)
        copies = [one.copy for one in updated if one.copy is not None]
        self._tensors = [*shards, *self._kept[: -len(shards)], *copies]
        self._addresses = [*map(torch.Tensor.data_ptr, self._tensors)]

    @staticmethod
    def _what_is_kept(states: Sequence[dict[str, Any]]) -> Iterable[torch.Tensor]:
        return chain.from_iterable(map(itemgetter(name), states) for name in KEPT)

    def is_there(self) -> bool:
        """Whether all is where it was, and as often updated. Nothing is done for each weight by itself."""
        try:
            same = all(map(is_, self._what_is_kept(self._states), self._kept))
        except KeyError:
            return False
        there = same and [*map(torch.Tensor.data_ptr, self._tensors)] == self._addresses
        return there and versions(self.counts) == self._versions

    def updated(self) -> None:
        """They have been, once more."""
        add_to_each(self.counts, 1)
        self._versions = versions(self.counts)
        self.step += 1

    def known(self) -> dict[nn.Parameter, tuple[torch.Tensor, int, int]]:
        """Of each shard its count, when that was written, and what it is."""
        rows = zip(self.shards, self.counts, self._versions, strict=True)
        return {shard: (count, written, self.step - 1) for shard, count, written in rows}


@dataclass(frozen=True)
class Prepared:
    """What lots were made of, beside the weights themselves: as long as it is the same, so are they."""

    lots: Sequence[Lot]
    gradients: Sequence[torch.Tensor | None]
    """Of all buckets."""
    groups: Sequence[Sequence[nn.Parameter]]
    moments: Sequence[torch.dtype]
    """By group."""
    keys: Sequence[Any]
    states: Sequence[dict[str, Any]]
    """All that the optimizer keeps."""
    names: Set[str]

    @property
    def stays(self) -> bool:
        """Whether gradients are in memory that is used again in the next step."""
        return not any(own is None for own in self.gradients)

    def is_of(self, optimizer: optim.Optimizer) -> bool:
        """Whether the optimizer has the same weights, and keeps the same of them."""
        groups, state = optimizer.param_groups, optimizer.state
        if len(groups) != len(self.groups) or len(state) != len(self.states):
            return False
        pairs = [(group["params"], before) for group, before in zip(groups, self.groups, strict=True)]
        if any(len(now) != len(before) or not all(map(is_, now, before)) for now, before in pairs):
            return False
        if [*map(_moments, groups)] != self.moments:
            return False
        return all(map(is_, state, self.keys)) and all(map(is_, state.values(), self.states))


PLAIN = {"amsgrad": False, "maximize": False, "capturable": False, "differentiable": False}


class Update:
    """Of all weights that this rank owns rows of, by its optimizer."""

    def __init__(self, optimizer: optim.Optimizer, spread: Spread, steps: int) -> None:
        """``steps``: of the whole run."""
        self.optimizer, self.spread = optimizer, spread
        method = Comm.parse(spread.layout.comm)
        self._exact_steps = method.exact_steps(steps) if method is not None else 0
        self._variance = FrozenVariance.of(optimizer, spread, steps)
        self._one_pass, self._streamed = OnePass(), StreamedPass(spread.device)
        self._offloaded = {w.shard for w in spread.weights.values() if w.storage.offloaded}
        self._homes = Homes(spread.device)
        self._steps: dict[nn.Parameter, tuple[torch.Tensor, int, int]] = {}
        """Of shards, their state's count of steps, when that was last written, and what it was then."""
        if isinstance(optimizer, AdamW):
            settle([adamw.KERNEL], spread.device, spread.mesh.world)
        self._known = _is_known(optimizer, spread)
        self._segments: dict[nn.Parameter, tuple[Segment, ...]] = {}
        """Of each shard, where its elements lie in the whole weight."""
        self._prepared: Prepared | None = None
        """Kept from one step to the next."""
        self._at_home: Prepared | None = None
        """The same, where it was seen that what is offloaded is where it is to be."""

    def begin(self, step: int, scale: float) -> None:
        """Before a step; ``scale``: of its loss."""
        if self._variance is not None:
            self._variance.begin(step, scale)
            return
        for group in self.optimizer.param_groups:
            group.pop("frozen", None)  # in a state that was taken up; it is so no more
        self.spread.reduction.encode(step >= self._exact_steps)

    def __call__(
        self, factor: float, without: set[str], apart: Mapping[str, float] = NONE, divisor: float = 1.0,
        count: float = 1.0,
    ) -> None:  # fmt: skip
        """``factor``: of the summed gradients; ``apart``: of weights that have one of their own.

        Weights in ``without`` have none. ``divisor``: of sums, without clipping; ``count``: of the loss's terms.
        """
        if self._variance is not None:
            frozen = self._variance.frozen
            self._variance.counted(count)
            if frozen:
                self._variance.update(factor, without, apart, divisor)
                return
        as_prepared = not without and self._as_prepared()
        if not as_prepared or self._prepared is None or self._prepared is not self._at_home:
            if self._moved_home(without) or not as_prepared:
                self._drop()
                self.prepare(without)
            self._at_home = self._prepared
        if self._prepared is not None:
            self._pass(self._prepared.lots, factor, apart)
            self.spread.updated(copied=self._prepared.names)
        else:
            self.spread.gradients.give(factor, without, apart)
            self.optimizer.step()
            self.spread.updated()
        self.forget(all_trained=not without)

    def forget(self, all_trained: bool = True) -> None:
        """What was prepared is done, or will not be: gradients can go that are not in memory which is used again."""
        if not all_trained or (self._prepared is not None and not self._prepared.stays):
            self._drop()

    def _drop(self) -> None:
        for lot in self._prepared.lots if self._prepared is not None else ():
            self._steps |= lot.known()
        self._prepared = self._at_home = None

    def prepare(self, without: Set[str] = frozenset()) -> None:
        """When gradients are on their way, and the device is busy: find what is to be updated in one pass, if so."""
        if self._variance is not None and self._variance.frozen:
            self._drop()
            self._variance.complete()
            return
        owned = [bucket.owned for bucket in self.spread.gradients.buckets]
        if self._prepared is not None and self._prepared.stays and all(map(is_, owned, self._prepared.gradients)):
            return  # whether all else is the same, is looked at when callbacks have been called
        self._drop()
        if not self.in_one_pass:
            return
        gradients = {w.shard: (w, own) for w, own in self.spread.gradients.each() if w.name not in without}
        groups = [[s for s in group["params"] if s in gradients] for group in self.optimizer.param_groups]
        for group, shards in zip(self.optimizer.param_groups, groups, strict=True):
            if not all(_fits(shard, self.optimizer.state.get(shard), _moments(group)) for shard in shards):
                return  # the optimizer begins what it keeps of them, or keeps it in another way
        lots: list[Lot] = []
        for number, shards in enumerate(groups):
            for (step, offloaded), same in self._alike(shards).items():
                updated = [self._updated(self.optimizer.param_groups[number], *gradients[shard]) for shard in same]
                one_pass = self._streamed if offloaded else self._one_pass
                launch = one_pass.prepared(updated, (number, len(same)))
                states = [self.optimizer.state[shard] for shard in same]
                lots.append(Lot(number, step, same, updated, states, launch))
        if lots:
            state, every = self.optimizer.state, self.optimizer.param_groups
            names = frozenset(gradients[shard][0].name for lot in lots for shard in lot.shards)
            params, moments = [list(group["params"]) for group in every], [*map(_moments, every)]
            self._prepared = Prepared(lots, owned, params, moments, [*state], [*state.values()], names)

    def _moved_home(self, without: Set[str]) -> bool:
        """Whether state is now where it is to be that was not: begun here, or restored elsewhere.

        Where some is offloaded all is begun here: the optimizer would have gradients on the host for it.
        """
        if not (self._offloaded and self.in_one_pass):
            return False
        state, moved = self.optimizer.state, False
        trained = {weight.shard for weight, _ in self.spread.gradients.each() if weight.name not in without}
        for group in self.optimizer.param_groups:
            for shard in trained.intersection(group["params"]):
                if not self._homes.has(shard, state.get(shard)):
                    state[shard] = self._homes.bring(shard, state.get(shard), _moments(group))
                    moved = True
        return moved

    def _as_prepared(self) -> bool:
        """Whether callbacks have left what is to be updated where it was. The device waits: this is to be quick."""
        if self._prepared is None:
            return True
        same = self.in_one_pass and self._prepared.is_of(self.optimizer)
        return same and all(lot.is_there() for lot in self._prepared.lots)

    @property
    def in_one_pass(self) -> bool:
        """Whether it may be: nobody else looks at what the optimizer is given, or has changed how it steps."""
        return self._known and not has_step_hooks(self.optimizer) and "step" not in vars(self.optimizer)

    @property
    def takes_as_made(self) -> bool:
        """Whether gradients may stay where and as narrow as backward makes them, since nothing is added to them."""
        return self.in_one_pass and self.spread.mesh.world.alone

    @torch.no_grad()
    def _pass(self, lots: Sequence[Lot], factor: float, apart: Mapping[str, float]) -> None:
        for lot in lots:
            name = lot.shards[0].logical_name  # type: ignore[attr-defined]
            numbers = _numbers(lot.step, self.optimizer.param_groups[lot.group], self.optimizer)
            lot.launch(numbers, apart.get(name, factor))  # a group's weights are clipped alike
        self._streamed.finish()
        for lot in lots:
            lot.updated()

    def _updated(self, group: dict[str, Any], weight: Weight, gradient: torch.Tensor) -> Updated:
        shard, state = weight.shard, self.optimizer.state[weight.shard]
        copy = weight.full.data if weight.storage.copies else None
        tensors = shard.data, gradient, state["exp_avg"], state["exp_avg_sq"], copy
        if _moments(group) == torch.float32:
            return Updated(*tensors)
        if shard not in self._segments:
            self._segments[shard] = tuple(segments(shard.shape, shard.logical_boxes, shard.logical_shape))  # type: ignore[attr-defined]
        return Updated(*tensors, adamw.key(group, shard), self._segments[shard])

    def _alike(self, shards: Sequence[nn.Parameter]) -> dict[tuple[int, bool], list[nn.Parameter]]:
        """Shards by how many updates of them this will have been, and whether they are the host's."""
        found: dict[tuple[int, bool], list[nn.Parameter]] = {}
        for shard in shards:
            count, known = self.optimizer.state[shard]["step"], self._steps.get(shard)
            done = known[2] if known and known[0] is count and known[1] == version(count) else int(count)
            found.setdefault((done + 1, shard in self._offloaded), []).append(shard)
        return found


def _is_known(optimizer: optim.Optimizer, spread: Spread) -> bool:
    """Whether it is torch's Adam, or ours, over this rank's rows, on a device where the kernel works."""
    if type(optimizer) not in (optim.Adam, optim.AdamW, AdamW) or spread.layout.exact:
        return False
    kernel = adamw.KERNEL if isinstance(optimizer, AdamW) else KERNEL
    if any(group.get(name, plain) != plain for group in optimizer.param_groups for name, plain in PLAIN.items()):
        return False
    shards = [shard for group in optimizer.param_groups for shard in group["params"]]
    if not all(isinstance(number, float | int) for group in optimizer.param_groups for number in _given(group)):
        return False
    owned = set(spread.shards())
    alike = all(s in owned and s.dtype == torch.float32 and s.is_contiguous() for s in shards)
    return alike and kernel.used(torch.empty(0, device=spread.device))


def _given(group: dict[str, Any]) -> tuple[Any, ...]:
    return group["lr"], *group["betas"], group["eps"], group["weight_decay"]


def _moments(group: dict[str, Any]) -> torch.dtype:
    return DTYPES[group.get("moments", "float32")]


def _fits(shard: nn.Parameter, state: dict[str, Any] | None, dtype: torch.dtype) -> bool:
    """Whether what is kept of a shard is what the kernel takes it for."""
    if not state or not isinstance(state.get("step"), torch.Tensor):
        return False
    return all(_like(shard, state.get(name), dtype) for name in ("exp_avg", "exp_avg_sq"))


def _like(shard: nn.Parameter, moment: Any, dtype: torch.dtype) -> bool:
    if not isinstance(moment, torch.Tensor) or not moment.is_contiguous():
        return False
    return (moment.dtype, moment.device, moment.shape) == (dtype, shard.device, shard.shape)


def _numbers(step: int, group: dict[str, Any], optimizer: optim.Optimizer) -> Hyperparameters:
    decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, (optim.AdamW, AdamW)))
    rate, first, second, tiny, decay = map(float, _given(group))  # a schedule may give numpy's
    return Hyperparameters(step, rate, (first, second), tiny, decay, decoupled)
