"""The weights' way under ZeRO 3 and parameter offload: gathered before a module needs them, let go after.

The next bucket is fetched while this one computes. A bucket is whole from its modules' forward to the end of it, and
again from the arrival of the first gradient at their outputs to that of the last gradient at their inputs; autograd
runs what was recorded later first, so by then all of the bucket's own backward is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from phalanx.anatomy import Unit
from phalanx.parallel.torch_private import installer, made_by
from phalanx.parallel.weights.bucket import Bucket
from phalanx.parallel.weights.weight import Weight
from phalanx.trees import mapped, reachable

VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}
"""Attributes of a tensor that give its values; all others only describe it."""
STAYS_WHOLE = ("after", "root", "tied")
"""Places of units that stay whole from forward to backward, which is about to need them anyway."""
DESCRIBING = {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point, Tensor.element_size,
    Tensor.requires_grad_,
}  # fmt: skip


def reads_values(func: Any) -> bool:
    """Whether a function of tensors needs more than their description."""
    attribute = getattr(getattr(func, "__self__", None), "__name__", "") if func.__name__ == "__get__" else None
    return attribute in VALUES if attribute else func not in DESCRIBING


class ReshardedWeight(nn.Parameter):
    """Stands in a module for a weight that is not whole. Whoever computes with it makes it whole."""

    unit: ShardedUnit
    weight: Weight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = mapped(partial(_awake, reads_values(func)), (args, kwargs or {}), ReshardedWeight)
        return func(*args, **kwargs)


def _awake(wake: bool, value: ReshardedWeight) -> Tensor:
    if wake:
        value.unit.need()
        if torch.is_grad_enabled():
            value.unit.open_call()  # when its backward is over, only the end of all of it tells
    return value.weight.full


class ShardedUnit:
    """A bucket whose weights are whole only while its modules compute."""

    def __init__(self, bucket: Bucket, unit: Unit) -> None:
        self.bucket, self.unit = bucket, unit
        self.keep = unit.place in STAYS_WHOLE
        """Stays whole from forward to backward, which is about to need it anyway."""
        self.calls: dict[object, object] = {}
        """Forward calls whose backward is not over, each with its part of the step."""
        self.part: object = None
        """What is computed just now: a micro-batch at a stage. Several may be on their way."""
        self.in_backward = False
        self.running: list[object] = []
        """Forward calls that have begun and not ended."""
        self.hooks: list[RemovableHandle] = []
        """On the graph of this part of the step. One that is left there holds its node, and that its graph and us."""
        resting = [(weight, self._resting(weight)) for weight in bucket.weights]
        self._install = installer([(*place, weight.full) for weight, _ in resting for place in weight.places])
        self._install_resting = installer(
            [(*place, stand_in) for weight, stand_in in resting for place in weight.places]
        )
        self.bucket.release()
        self._install_resting()

    def _resting(self, weight: Weight) -> ReshardedWeight:
        stand_in = ReshardedWeight(torch.empty(weight.shape, dtype=weight.full.dtype, device="meta"), weight.trainable)
        stand_in.unit, stand_in.weight = self, weight
        return stand_in

    def open_call(self) -> object:
        """A forward call that a backward will follow."""
        call = object()
        self.calls[call] = self.part
        return call

    def need(self) -> None:
        """Whole now, and visible to the modules."""
        if not self.bucket.is_whole:
            self.bucket.finish_gather()
            self._install()

    def rest(self) -> None:
        """Not whole, and a stand-in visible to the modules."""
        if self.bucket.is_whole or self.bucket.is_coming:
            self.bucket.release()
            self._install_resting()

    def finish(self) -> None:
        """Its part of this backward is over."""
        if self.calls:
            self.calls = {call: part for call, part in self.calls.items() if part != self.part}
        self.running.clear()
        self.in_backward = False
        if not self.calls:
            for hook in self.hooks:
                hook.remove()
            self.hooks.clear()
        self.rest()

    @property
    def busy(self) -> bool:
        """Whether this part of the step has calls whose backward is not over."""
        return self.part in self.calls.values()


class Gathering:
    """Hooks on the modules of every unit, and which bucket to fetch ahead of need."""

    def __init__(self, model: nn.Module, units: Sequence[ShardedUnit]) -> None:
        self.units = units
        self.by_bucket = {id(g.bucket): g for g in units}
        self.together: list[list[ShardedUnit]] = []
        """Units of the same modules, whose weights have different dtypes, side by side."""
        for item in units:
            if self.together and self.together[-1][0].unit.modules == item.unit.modules:
                self.together[-1].append(item)
            else:
                self.together.append([item])
        self.place = {id(item): number for number, items in enumerate(self.together) for item in items}
        self.on_done: Callable[[Bucket], None] = self.finish
        """Told when no more gradients will come for a bucket in this backward."""
        self.in_step = False
        """Whether a step's own backward runs, and not one that the model runs for itself."""
        self.passes: Callable[[str], bool] = lambda name: False
        """Whether a module is passed by, as by a pipeline's other stages."""
        for index, item in enumerate(units):
            for name in item.unit.modules:
                module = model.get_submodule(name)
                module.register_forward_pre_hook(partial(self._before, index, name), prepend=True, with_kwargs=True)
                module.register_forward_hook(partial(self._after, index, name), with_kwargs=True)

    def begin(self, part: object) -> None:
        """From here on, this part of the step is computed."""
        for item in self.units:
            item.part = part

    def _before(self, index: int, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.passes(name):
            return
        item = self.units[index]
        item.need()
        self._fetch_next(item, 1)
        if torch.is_grad_enabled() and not item.in_backward:
            call = item.open_call()  # until its inputs' gradients are there, or backward ends
            item.running.append(call)
            inputs = [tensor for tensor in reachable((args, kwargs)) if tensor.grad_fn is not None]
            if inputs:
                item.hooks.append(register_multi_grad_hook(inputs, partial(self._inputs_done, index, call), mode="all"))

    def _after(self, index: int, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        item = self.units[index]
        if item.in_backward or self.passes(name):
            return
        if torch.is_grad_enabled() and item.running:
            self._await_backward(index, item.running.pop(), output)
        if not item.keep:
            item.rest()

    def start_backward(self) -> None:
        """A step's backward begins: what stays whole for it may have been let go by another part's."""
        self.in_step = True
        for item in self.units:
            if item.keep and item.busy:
                item.need()

    def left(self, output: Any) -> None:
        """A forward was left with this output, before the modules around it came to their end."""
        for index, item in enumerate(self.units):
            for call in item.running:
                self._await_backward(index, call, output)
            item.running.clear()

    def _await_backward(self, index: int, call: object, output: Any) -> None:
        # on the nodes: their hooks come after those of whoever took the tensors, whose weights can go first
        for node in {node for tensor in reachable(output) for node in made_by(tensor)}:
            self.units[index].hooks.append(node.register_prehook(partial(self._before_backward, index, call)))

    def _before_backward(self, index: int, call: object, gradients: Any) -> None:
        if call not in self.units[index].calls:
            return  # over already: an output that was an input too
        self.units[index].in_backward = self.in_step
        self.units[index].need()
        self._fetch_next(self.units[index], -1)

    def _inputs_done(self, index: int, call: object, gradients: Any) -> None:
        item = self.units[index]
        if self.in_step and call in item.calls:
            del item.calls[call]
            if not item.busy:
                self.on_done(item.bucket)

    def _fetch_next(self, item: ShardedUnit, way: int) -> None:
        """Begin to gather what comes after or before a unit, when all that is needed with it is there.

        Sooner it would be in memory beside what of this one is still on its way.
        """
        place = self.place[id(item)]
        if 0 <= place + way < len(self.together) and all(other.bucket.is_whole for other in self.together[place]):
            for coming in self.together[place + way]:
                coming.bucket.start_gather()

    def busy(self, bucket: Bucket) -> bool:
        """Whether a later hook will say that the bucket's backward is over."""
        return id(bucket) in self.by_bucket and self.by_bucket[id(bucket)].busy

    def finish(self, bucket: Bucket) -> None:
        if id(bucket) in self.by_bucket:  # others are always whole
            self.by_bucket[id(bucket)].finish()

    def rest(self) -> None:
        """Let every bucket go, as after an evaluation or an update."""
        for item in self.units:
            item.calls.clear()
            item.finish()
