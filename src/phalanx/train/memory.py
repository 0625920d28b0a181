"""What a rank holds, by arithmetic: weights, gradients, what optimizer, averages and sites keep, and what a step adds.

A `Placement` says where every weight lies; what an optimizer keeps of one is seen by having it update weights that have
shapes and no memory. Activations are not in it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn, optim

from phalanx.adamw import AdamW
from phalanx.callbacks import EMA, Callback
from phalanx.comm import ONCE, Comm
from phalanx.kernels.moments import DTYPES
from phalanx.layout import Layout
from phalanx.local_updates import LocalUpdates
from phalanx.parallel.communication.codecs.chosen import codec_of
from phalanx.parallel.communication.codecs.codec import Codec
from phalanx.parallel.communication.mesh import Grid
from phalanx.parallel.weights.bucket import GLOO_BYTES
from phalanx.parallel.weights.matrices import COPY, owners
from phalanx.parallel.weights.placement import Placed, Placement
from phalanx.parallel.weights.shard import STAYS_WHOLE
from phalanx.precision import Dtypes
from phalanx.task import Task
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
    sites: int = 0
    """What sites that train by themselves have agreed on, what moves it, and what travels between them."""
    passing: int = 0
    """Within a step alone: weights that are gathered for a module, and gradients and weights on their way."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.averages + self.sites + self.passing

    def __str__(self) -> str:
        found = f"weights {in_bytes(self.weights)}, gradients {in_bytes(self.gradients)}"
        found += f", optimizer {in_bytes(self.optimizer)}"
        found += "".join(f", {name} {in_bytes(own)}" for name in ("averages", "sites") if (own := getattr(self, name)))
        found += f", within a step {in_bytes(self.passing)}" if self.passing else ""
        return f"{in_bytes(self.total)} a rank without activations: {found}"


@dataclass(frozen=True)
class Kept:
    """What is kept beside the weights of a task."""

    state: Mapping[str, float]
    """Bytes that the optimizer has for each weight, all ranks' together."""
    whole: frozenset[str]
    """The weights that are updated whole, and whose state lies at their owners."""
    averages: int
    """How often callbacks keep an average of each weight."""
    tried: bool = True
    """Whether this was found by an optimizer of weights without memory, of their whole shapes."""
    sites: KeptBySites = field(default_factory=lambda: KeptBySites())

    @classmethod
    def of(
        cls, task: Task, placement: Placement, dtypes: Dtypes, callbacks: Sequence[Callback],
        described: Mapping[str, nn.Parameter] | None = None, local: LocalUpdates | None = None,
    ) -> Kept:  # fmt: skip
        """``described``: the model's weights, with what its author noted on them, by which a task may choose."""
        shapes = {name: one.shape for name, one in placement.weights.items() if one.policy.trainable}
        averages = sum(isinstance(each, EMA) for each in callbacks)
        sizes = {name: shape.numel() for name, shape in shapes.items()}
        sites = KeptBySites() if local is None else KeptBySites.of(local, sizes)
        for device in ("meta", "cpu"):  # some want memory: they get that of one number
            weights = [_stand_in(name, shape, device, dtypes.parameter) for name, shape in shapes.items()]
            for weight, name in zip(weights, shapes, strict=True):
                vars(weight).update(vars(described[name]) if described else {}, logical_name=name)
            try:
                made = make_optimizer(task, weights, bool(weights))
            except Exception:  # to be seen when it is made of the weights themselves
                continue
            whole = frozenset(wants_whole(made))
            state = _state(made, shapes, dtypes.optimizer)
            return cls(state, whole, averages, device == "meta", sites)
        each = 2 * dtypes.optimizer.itemsize
        return cls({n: each * size for n, size in sizes.items()}, frozenset(), averages, False, sites)


@dataclass(frozen=True)
class KeptBySites:
    """What sites that train by themselves keep beside their weights."""

    copies: int = 0
    """Of each weight: what all have agreed on, and what moves it."""
    travelling: Mapping[str, int] = field(default_factory=dict)
    """The fragment that a weight travels in while steps are trained, if it does: as a message, beside a copy of it."""
    codec: Codec | None = None
    """By which it travels."""

    @classmethod
    def of(cls, local: LocalUpdates, sizes: Mapping[str, int]) -> KeptBySites:
        """``sizes``: of all trained weights."""
        codec = codec_of(Comm(local.codec)) if local.codec else None
        assert codec is None or isinstance(codec, Codec)
        return cls(1 + bool(local.outer[1]), local.divided(sizes) if local.overlap else {}, codec)

    def message(self, numbers: int, dtype: torch.dtype) -> int:
        """Bytes of a weight's part of a message; with a codec its codes, those that come, and their sum's too."""
        if self.codec is None:
            return dtype.itemsize * numbers
        whole = -(-numbers // self.codec.block) * self.codec.block
        return dtype.itemsize * whole + 3 * self.codec.size(whole, dtype)


def _stand_in(name: str, shape: torch.Size, device: str, dtype: torch.dtype) -> Any:
    """One number is a row of one."""
    size = (shape or torch.Size([1])) if device == "meta" else [1] * max(1, len(shape))
    parameter = nn.Parameter(torch.zeros(size, device=device, dtype=dtype))
    parameter.logical_name = name  # type: ignore[attr-defined]
    return parameter


def _state(optimizer: optim.Optimizer, shapes: Mapping[str, torch.Size], dtype: torch.dtype) -> dict[str, float]:
    """How many bytes it keeps of each weight: seen, or known."""
    found: dict[str, float] = {}
    for part in parts_of(optimizer):
        weights = [weight for group in part.param_groups for weight in group["params"]]
        known = {
            weight.logical_name: _itemsize(part, group, dtype) * _known(part, shapes[weight.logical_name])
            for group in part.param_groups
            for weight in group["params"]
        }
        try:
            found |= _seen(part, weights) if all(weight.is_meta for weight in weights) else known
        except Exception:  # it looks at values
            found |= known
    return found


def _seen(optimizer: optim.Optimizer, weights: Sequence[Any]) -> dict[str, float]:
    for weight in weights:
        weight.grad = torch.empty_like(weight)
    optimizer.step()
    state = {weight.logical_name: leaves(optimizer.state[weight], Tensor) for weight in weights}
    return {name: sum(t.numel() * t.itemsize for t in tensors if t.ndim) for name, tensors in state.items()}


def _itemsize(optimizer: optim.Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> int:
    """Of each number that is kept of a group's weights."""
    return (DTYPES[group["moments"]] if isinstance(optimizer, AdamW) else dtype).itemsize


def _known(optimizer: optim.Optimizer, shape: torch.Size) -> int:
    """What an optimizer will keep of a weight, as far as its kind tells."""
    if isinstance(optimizer, optim.Adafactor) and len(shape) > 1:
        return shape[:-1].numel() + shape[:-2].numel() * shape[-1]
    each = next((number for kind, number in NUMBERS.items() if isinstance(optimizer, kind)), 2)
    groups = optimizer.param_groups
    momentum = any(group.get("momentum") for group in groups) and each < 2
    averages = any(group.get("amsgrad") or group.get("centered") for group in groups)
    return (each + momentum + averages) * shape.numel()


def fullest(placement: Placement, kept: Kept, dtypes: Dtypes) -> Memory:
    """Of the rank that will hold most: ranks differ by their stages, and by the whole matrices that they own."""
    found, owned = [], owned_state(placement, kept)
    layout = placement.layout if placement.layout.local is None else placement.layout.site
    stages = layout.dp * len(owned[0])
    for stage, of_member in enumerate(owned):
        for member in {0, of_member.index(max(of_member))}:
            found.append(held(placement, Grid(layout, stage * stages + member), kept, dtypes, of_member[member]))
    return max(found, key=lambda memory: memory.total)


def owned_state(placement: Placement, kept: Kept) -> list[list[float]]:
    """By stage and member of a copy of its weights: bytes of the state of whole matrices that the member owns."""
    layout = placement.layout
    members = Grid(layout, 0).size(*COPY)
    whole = {name: one for name, one in placement.weights.items() if name in kept.whole}
    owner = owners({n: one.shape for n, one in whole.items()}, {n: one.stages for n, one in whole.items()}, members)
    found = [[0.0] * members for _ in range(layout.pp)]
    for name, one in whole.items():
        for stage in one.stages:
            found[stage][owner[name]] += kept.state[name]
    return found


def held(placement: Placement, grid: Grid, kept: Kept, dtypes: Dtypes, owned: float) -> Memory:
    """By one rank. ``owned``: bytes of the state of whole matrices that it owns."""
    weights = gradients = averages = sites = 0.0
    travels = defaultdict[int, float](float)
    for one, own in placement.owned(grid):
        part = one.part(grid).numel()
        weights += _lies(one, part, own, placement.layout.coded_axis == "fsdp")
        if one.policy.trainable:
            gradients += dtypes.reduce.itemsize * (own if _scattered(placement.layout, grid, one) else part)
            gradients += dtypes.reduce.itemsize * _owed(placement.layout, part, own)
            averages += one.policy.dtype.itemsize * kept.averages * own
            sites += one.policy.dtype.itemsize * kept.sites.copies * own
            if (fragment := kept.sites.travelling.get(one.name)) is not None:
                travels[fragment] += one.policy.dtype.itemsize * own + kept.sites.message(math.ceil(own), dtypes.reduce)
            if one.name not in kept.whole:
                owned += kept.state.get(one.name, 0) * own / max(1, one.shape.numel())
    sites += max(travels.values(), default=0.0)
    return Memory(*map(math.ceil, (weights, gradients, owned, averages, sites, passing(placement, grid, dtypes))))


def passing(placement: Placement, grid: Grid, dtypes: Dtypes) -> float:
    """Bytes that a step takes beside what is held between steps, without activations.

    The largest gradient as backward makes it. Of weights that are gathered where they are used (ZeRO 3), those that
    stay whole for a step, two neighbours of the others, and for the largest unit a buffer that its weights arrive in
    and one of its gradients. Of weights that are gathered after an update (ZeRO 1 and 2), the same two for a bucket.
    """
    here = {one.name: one for one, _ in placement.owned(grid)}
    sizes = {name: one.policy.compute.itemsize * one.part(grid).numel() for name, one in here.items()}
    trained = [name for name, one in here.items() if one.policy.trainable]
    largest = float(max((sizes[name] for name in trained), default=0))
    sharded = {name: one.policy.always_whole for name, one in here.items() if grid.size(*one.policy.axes) > 1}
    gathered = {
        unit: sum(sizes[name] for name in unit.weights if sharded.get(name) is False)
        for unit in placement.anatomy.units
    }
    kept = sum(size for unit, size in gathered.items() if unit.place in STAYS_WHOLE)
    others = [size for unit, size in gathered.items() if unit.place not in STAYS_WHOLE]
    neighbours = max(map(sum, pairwise([0, *others])), default=0)
    wide = dtypes.reduce.itemsize / dtypes.compute.itemsize
    travelling = (1 + wide) * max(gathered.values(), default=0)
    if any(sharded.values()):
        whole = [sizes[name] for name, always in sharded.items() if always]
        travelling = max(travelling, (1 + wide) * max(max(whole), min(sum(whole), GLOO_BYTES)))
    return largest + kept + neighbours + travelling


def _scattered(layout: Layout, grid: Grid, one: Placed) -> bool:
    """Whether a rank keeps the gradients of the rows that it owns alone."""
    return layout.zero >= 2 and grid.size(*one.policy.axes) > 1


def _owed(layout: Layout, part: int, own: int) -> float:
    """Numbers that are owed of a weight's gradient, twice: after the last step, and as the next one will leave them."""
    method = Comm.parse(layout.comm)
    if method is None or not method.owes or not layout.coded_axis:
        return 0
    of_sums = 0 if method.name in ONCE else own / layout.dp
    return 2 * part if layout.coded_axis == "fsdp" else 2 * (own + of_sums)


def _lies(one: Placed, part: int, own: int, coded: bool) -> int:
    """Bytes of a weight on a rank that computes with ``part`` of it, ``coded`` or not, and owns ``own``."""
    policy = one.policy
    if not policy.always_whole:
        return policy.dtype.itemsize * own
    same = policy.dtype == policy.compute and not policy.offloaded and not coded
    return policy.compute.itemsize * part + (0 if same else policy.dtype.itemsize * own)
