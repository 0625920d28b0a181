"""What a rank holds between two steps, by arithmetic: weights, gradients, and what optimizer and averages keep of them.

A `Placement` says where every weight lies; what an optimizer keeps of one is seen by having it update weights that have
shapes and no memory. Activations are not in it, nor buffers of what is under way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim

from phalanx.callbacks import EMA
from phalanx.layout import Layout
from phalanx.parallel.communication.mesh import AXES, Grid
from phalanx.parallel.weights.matrices import COPY
from phalanx.parallel.weights.placement import Placed, Placement
from phalanx.precision import Dtypes
from phalanx.task import Task
from phalanx.train.calling import made_callbacks
from phalanx.train.optimizers import make_optimizer, parts_of, wants_whole
from phalanx.trees import leaves
from phalanx.words import in_bytes

NUMBERS = {optim.SGD: 0, optim.Adagrad: 1, optim.RMSprop: 1, optim.ASGD: 1, optim.Adafactor: 1}
"""What an optimizer keeps of each element, where it cannot be seen and is not two, as Adam's is; without momentum."""


@dataclass(frozen=True)
class Memory:
    """Of one rank, in bytes."""

    weights: int
    gradients: int
    optimizer: int
    averages: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.averages

    def __str__(self) -> str:
        found = f"weights {in_bytes(self.weights)}, gradients {in_bytes(self.gradients)}"
        averages = f", averages {in_bytes(self.averages)}" if self.averages else ""
        found += f", optimizer {in_bytes(self.optimizer)}{averages}"
        return f"{in_bytes(self.total)} a rank without activations: {found}"


@dataclass(frozen=True)
class Kept:
    """What is kept beside the weights of a task."""

    state: Mapping[str, int]
    """Numbers that the optimizer has for each weight, all ranks' together."""
    whole: frozenset[str]
    """The weights that are updated whole, and whose state lies at their owners."""
    averages: int
    """Callbacks that keep an average of each weight."""

    @classmethod
    def of(cls, task: Task, shapes: Mapping[str, torch.Size]) -> Kept:
        """``shapes``: of the weights that are trained."""
        averages = sum(isinstance(each, EMA) for each in made_callbacks(task))
        for device in ("meta", "cpu"):  # some want memory: they get that of one number
            weights = [_stand_in(name, shape, device) for name, shape in shapes.items()]
            try:
                made = make_optimizer(task, weights, bool(weights))
            except Exception:
                continue
            return cls(_state(made, shapes), frozenset(wants_whole(made)), averages)
        return cls({name: 2 * shape.numel() for name, shape in shapes.items()}, frozenset(), averages)


def _stand_in(name: str, shape: torch.Size, device: str) -> nn.Parameter:
    """One number is a row of one."""
    size = (shape or torch.Size([1])) if device == "meta" else [1] * max(1, len(shape))
    parameter = nn.Parameter(torch.zeros(size, device=device))
    parameter.logical_name = name  # type: ignore[attr-defined]
    return parameter


def _state(optimizer: optim.Optimizer, shapes: Mapping[str, torch.Size]) -> dict[str, int]:
    """How many numbers it keeps of each weight: seen, or known."""
    found: dict[str, int] = {}
    for part in parts_of(optimizer):
        weights = [weight for group in part.param_groups for weight in group["params"]]
        try:
            found |= _seen(part, weights)
        except Exception:  # it looks at values, or was made on the processor
            found |= {w.logical_name: _known(part, shapes[w.logical_name]) for w in weights}
    return found


def _seen(optimizer: optim.Optimizer, weights: Sequence[Any]) -> dict[str, int]:
    for weight in weights:
        if not weight.is_meta:
            raise RuntimeError(f"{weight.logical_name} has memory")
        weight.grad = torch.empty_like(weight)
    optimizer.step()
    state = {weight.logical_name: leaves(optimizer.state[weight], Tensor) for weight in weights}
    return {name: sum(tensor.numel() for tensor in tensors if tensor.ndim) for name, tensors in state.items()}


def _known(optimizer: optim.Optimizer, shape: torch.Size) -> int:
    """What an optimizer will keep of a weight, as far as its kind tells."""
    if isinstance(optimizer, optim.Adafactor) and len(shape) > 1:
        return shape[:-1].numel() + shape[:-2].numel() * shape[-1]
    each = next((number for kind, number in NUMBERS.items() if isinstance(optimizer, kind)), 2)
    groups = optimizer.param_groups
    momentum = any(group.get("momentum") for group in groups) and each < 2
    averages = any(group.get("amsgrad") or group.get("centered") for group in groups)
    return (each + momentum + averages) * shape.numel()


def described_memory(task: Task, placement: Placement, dtypes: Dtypes) -> Memory:
    """Of the rank that will hold most; ranks differ by their stages alone."""
    trained = {name: one.shape for name, one in placement.weights.items() if one.policy.trainable}
    kept, apart = Kept.of(task, trained), math.prod(getattr(placement.layout, axis) for axis in AXES[1:])
    ranks = [Grid(placement.layout, stage * apart) for stage in range(placement.layout.pp)]
    return max((held(placement, grid, kept, dtypes) for grid in ranks), key=lambda memory: memory.total)


def held(placement: Placement, grid: Grid, kept: Kept, dtypes: Dtypes) -> Memory:
    """By one rank."""
    weights = gradients = state = averages = 0.0
    for one, own in placement.owned(grid):
        part = one.part(grid).numel()
        weights += _lies(one, part, own)
        if one.policy.trainable:
            gradients += dtypes.reduce.itemsize * (own if _scattered(placement.layout, grid, one) else part)
            share = 1 / grid.size(*COPY) if one.name in kept.whole else own / max(1, one.shape.numel())
            state += dtypes.optimizer.itemsize * kept.state.get(one.name, 0) * share
            averages += one.policy.dtype.itemsize * kept.averages * own
    return Memory(math.ceil(weights), math.ceil(gradients), math.ceil(state), math.ceil(averages))


def _scattered(layout: Layout, grid: Grid, one: Placed) -> bool:
    """Whether a rank keeps the gradients of the rows that it owns alone."""
    return layout.zero >= 2 and grid.size(*one.policy.axes) > 1


def _lies(one: Placed, part: int, own: int) -> int:
    """Bytes of a weight on a rank that computes with ``part`` of it and owns ``own``."""
    policy = one.policy
    if not policy.always_whole:
        return policy.dtype.itemsize * own
    same = policy.dtype == policy.compute and not policy.offloaded
    return policy.compute.itemsize * part + (0 if same else policy.dtype.itemsize * own)
