"""A step's update: gradients are scaled and given to the optimizer; on a GPU Adam's is one pass over memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import nn, optim

from phalanx import adamw
from phalanx.adamw import AdamW
from phalanx.kernels.adamw import KERNEL, Hyperparameters, OnePass, Segment, Updated
from phalanx.kernels.moments import DTYPES
from phalanx.parallel.spread import Spread
from phalanx.parallel.torch_private import add_to_each, has_step_hooks, version
from phalanx.parallel.weights.boxes import segments
from phalanx.parallel.weights.weight import Weight
from phalanx.train.agreement import settle
from phalanx.train.streaming import Homes, StreamedPass


@dataclass(frozen=True)
class Lot:
    """Weights of one of the optimizer's groups that have been updated as often."""

    group: int
    step: int
    """The next is their so-manyth."""
    shards: Sequence[nn.Parameter]
    updated: Sequence[Updated]
    states: Sequence[dict[str, Any]]
    """Of these shards, what the optimizer keeps of each."""
    names: Set[str]
    launch: Callable[[Hyperparameters, float], None]


PLAIN = {"amsgrad": False, "maximize": False, "capturable": False, "differentiable": False}


class Update:
    """Of all weights that this rank owns rows of, by its optimizer."""

    def __init__(self, optimizer: optim.Optimizer, spread: Spread) -> None:
        self.optimizer, self.spread = optimizer, spread
        self._one_pass, self._streamed = OnePass(), StreamedPass(spread.device)
        self._offloaded = {w.shard for w in spread.weights.values() if w.storage.offloaded}
        self._homes = Homes(spread.device)
        self._steps: dict[nn.Parameter, tuple[torch.Tensor, int, int]] = {}
        """Of each shard, its state's count of steps, when that was last read or written, and what it was then."""
        if isinstance(optimizer, AdamW):
            settle([adamw.KERNEL], spread.device, spread.mesh.world)
        self._known = _is_known(optimizer, spread)
        self._segments: dict[nn.Parameter, tuple[Segment, ...]] = {}
        """Of each shard, where its elements lie in the whole weight."""
        self._lots: list[Lot] = []

    def __call__(self, factor: float, without: set[str]) -> None:
        """``factor``: of the summed gradients. Weights in ``without`` have none."""
        if self._moved_home(without) or without or not self._as_prepared():
            self.prepare(without)
        if self._lots:
            self._pass(self._lots, factor)
            self.spread.updated(copied=frozenset[str]().union(*(lot.names for lot in self._lots)))
        else:
            self.spread.gradients.give(factor, without)
            self.optimizer.step()
            self.spread.updated()
        self.forget()

    def forget(self) -> None:
        """What was prepared is done, or will not be: its gradients can go."""
        self._lots = []

    def prepare(self, without: Set[str] = frozenset()) -> None:
        """When gradients are on their way, and the device is busy: find what is to be updated in one pass, if so."""
        self.forget()
        if not self.in_one_pass:
            return
        gradients = {w.shard: (w, own) for w, own in self.spread.gradients.each() if w.name not in without}
        groups = [[s for s in group["params"] if s in gradients] for group in self.optimizer.param_groups]
        for group, shards in zip(self.optimizer.param_groups, groups, strict=True):
            if not all(_fits(shard, self.optimizer.state.get(shard), _moments(group)) for shard in shards):
                return  # the optimizer begins what it keeps of them, or keeps it in another way
        for number, shards in enumerate(groups):
            for (step, offloaded), same in self._alike(shards).items():
                updated = [self._updated(self.optimizer.param_groups[number], *gradients[shard]) for shard in same]
                names = frozenset(gradients[shard][0].name for shard in same)
                one_pass = self._streamed if offloaded else self._one_pass
                launch = one_pass.prepared(updated, (number, len(same)))
                states = [self.optimizer.state[shard] for shard in same]
                self._lots.append(Lot(number, step, same, updated, states, names, launch))

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
        return not self._lots or (self.in_one_pass and all(map(self._is_there, self._lots)))

    def _is_there(self, lot: Lot) -> bool:
        moved = [shard.data_ptr() for shard in lot.shards] != [one.weight.data_ptr() for one in lot.updated]
        if moved or not all(map(is_, map(self.optimizer.state.get, lot.shards), lot.states)):
            return False
        pairs = zip(lot.states, lot.updated, strict=True)
        return all(k.get("exp_avg") is one.first and k.get("exp_avg_sq") is one.second for k, one in pairs)

    @property
    def in_one_pass(self) -> bool:
        """Whether it may be: nobody else looks at what the optimizer is given, or has changed how it steps."""
        return self._known and not has_step_hooks(self.optimizer) and "step" not in vars(self.optimizer)

    @property
    def takes_as_made(self) -> bool:
        """Whether gradients may stay where and as narrow as backward makes them, since nothing is added to them."""
        return self.in_one_pass and self.spread.mesh.world.alone

    @torch.no_grad()
    def _pass(self, lots: Sequence[Lot], factor: float) -> None:
        for lot in lots:
            lot.launch(_numbers(lot.step, self.optimizer.param_groups[lot.group], self.optimizer), factor)
        for lot in lots:
            counts = [self.optimizer.state[shard]["step"] for shard in lot.shards]
            add_to_each(counts, 1)
            for shard, count in zip(lot.shards, counts, strict=True):
                self._steps[shard] = count, version(count), lot.step

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
