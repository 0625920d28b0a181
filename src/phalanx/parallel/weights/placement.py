"""Where everything lies, as a value: made from a described model, its anatomy and a layout, before any rank is there.

It says of every weight which part of it a rank computes with, which rows it owns and updates, where and in which dtype
they are kept, and over which axes its gradient is summed; and of every axis what must travel along it. It is asked of
a rank by the rank's place in the `Grid`, and never goes through all ranks. `Spread` applies it to a mesh; checks before
a launch, a dry run and a proof's census read the same value. One thing is learned later: a container whose code turns
out to fix sizes is gathered (`cuts.gather_inside`), which changes the plan alone.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from phalanx.anatomy import Anatomy
from phalanx.errors import WrongUse
from phalanx.layout import Layout
from phalanx.parallel.axes import batchnorm, hugging_face
from phalanx.parallel.axes.context import check_context, seems_to_attend
from phalanx.parallel.axes.cuts import Cut, Plan, make_plan
from phalanx.parallel.axes.expert import cut_experts
from phalanx.parallel.axes.stages import Stages, divide
from phalanx.parallel.communication.mesh import EXPERT_SHARD, SHARD, Grid
from phalanx.parallel.weights.boxes import Box, boxes_of
from phalanx.parallel.weights.weight import Rows
from phalanx.precision import DTYPES, Dtypes

CP_TRAVELS = {"gather": ("all-gather",), "ulysses": ("all-to-all",)}


@dataclass(frozen=True)
class StoragePolicy:
    """How a weight is kept on the ranks that have it, and how it travels."""

    dtype: torch.dtype
    """Of the rows that a rank owns."""
    compute: torch.dtype
    """Of what a rank computes with."""
    axes: tuple[str, ...]
    """Its rows are sharded over these; over none, every rank has all of it."""
    offloaded: bool
    """Rows and their optimizer state are in the host's memory."""
    always_whole: bool
    """Ranks keep it whole between uses (ZeRO 1 and 2), or gather it for each use (ZeRO 3)."""
    trainable: bool

    def home(self, device: torch.device) -> torch.device:
        """Where a rank that computes on this device keeps its rows and their optimizer state."""
        return torch.device("cpu") if self.offloaded else device


@dataclass(frozen=True)
class Placed:
    """One weight, under its layout-free name."""

    name: str
    shape: torch.Size
    policy: StoragePolicy
    cut: Cut | None
    """How ``tp`` or ``ep`` divides it."""
    stages: tuple[int, ...]
    """The ranks of ``pp`` that have it."""

    def here(self, grid: Grid) -> bool:
        """Whether a rank's stages have it."""
        return grid.index("pp") in self.stages

    def index(self, grid: Grid) -> int:
        """A rank's place along the axis that divides it."""
        return 0 if self.cut is None else grid.index(self.cut.axis)

    def part(self, grid: Grid) -> torch.Size:
        """The shape of what a rank computes with."""
        return self.shape if self.cut is None else self.cut.shape(self.shape, self.index(grid))

    def alike(self, grid: Grid) -> Sequence[int]:
        """The ranks of ``tp`` that compute with the same part of it as a rank."""
        return self.cut.sharers(self.index(grid)) if self.cut and self.cut.axis == "tp" else range(grid.size("tp"))

    def rows(self, grid: Grid) -> Rows:
        """Which rows of its part a rank owns and updates."""
        axes = self.policy.axes
        return Rows.of(self.part(grid), grid.size(*axes), grid.index(*axes))

    def boxes(self, grid: Grid) -> list[Box]:
        """Where the rows that a rank owns lie in the whole weight."""
        places = boxes_of(self.rows(grid), self.cut, self.index(grid)) if self.here(grid) else ()
        return [place.box for place in places]


@dataclass(frozen=True)
class Placement:
    """A model under a layout."""

    layout: Layout
    anatomy: Anatomy
    weights: Mapping[str, Placed]
    plan: Plan
    """What ``tp`` and ``ep`` do to modules. A container may be gathered later, when its code is seen to fix sizes."""
    stages: Stages | None
    attends: frozenset[str] = frozenset()
    """Blocks with attention, which `cp` must reach."""

    @classmethod
    def of(cls, model: nn.Module, anatomy: Anatomy, layout: Layout, dtypes: Dtypes = DTYPES["fp32"]) -> Placement:
        """Refuses a model that cannot be cut as the layout says."""
        check_blocks(layout, anatomy)
        check_exact(layout, model)
        plan = make_plan(model, anatomy, layout.tp) if layout.tp > 1 else Plan()
        if layout.ep > 1:
            cut_experts(plan, model, anatomy, layout.ep)
        if layout.cp > 1:
            check_context(model, anatomy, layout.cp)
            hugging_face.check_attention(model, layout.cp)
        stages = divide(model, anatomy, layout.pp, layout.schedule) if layout.pp > 1 else None
        offloaded = set(_offloaded(model, layout, stages))
        weights = {
            name: Placed(
                name, weight.shape, _policy(weight, plan.cuts.get(name), layout, dtypes, name in offloaded),
                plan.cuts.get(name), tuple(stages.holders(name)) if stages is not None else (0,),
            )
            for name, weight in model.named_parameters()
        }  # fmt: skip
        attends = {block for block in anatomy.blocks if layout.cp > 1 and seems_to_attend(model.get_submodule(block))}
        return cls(layout, anatomy, weights, plan, stages, frozenset(attends))

    def has(self, grid: Grid, module: str) -> bool:
        """Whether a rank's stages have a module."""
        return self.stages is None or grid.index("pp") in self.stages.holders(module)

    def summed_over(self, name: str) -> tuple[str, ...]:
        """The axes over which a weight's gradient is summed, each rank having a part of it."""
        one, layout = self.weights[name], self.layout
        shared = one.cut is not None and one.cut.axis == "tp" and len(one.cut.sharers(0)) > 1
        found = {
            "dp": layout.dp > 1 and layout.local is None,
            "fsdp": layout.fsdp > 1,
            "cp": layout.cp > 1,
            "tp": layout.tp > 1 and (shared or name in self.plan.partial),
            "pp": len(one.stages) > 1,
        }
        return tuple(axis for axis, summed in found.items() if summed and one.policy.trainable)

    def travels(self, grid: Grid, called: Container[str] | None = None) -> dict[str, tuple[str, ...]]:
        """By axis, the kinds of collectives and messages that a step of a rank cannot do without.

        ``called``: the modules that compute in that step, if not all do. A rank whose stages have none of those that
        need a message sends none.
        """
        layout = self.layout

        def computes(modules: Iterable[str]) -> bool:
            return any(self.has(grid, name) and (called is None or name in called) for name in modules)

        trained = [n for n, one in self.weights.items() if one.policy.trainable and one.here(grid)]
        sequence_parallel = ("all-gather", "reduce-scatter") if self.plan.sequence_parallel else ("all-reduce",)
        attention = CP_TRAVELS[layout.cp_kind] if computes(self.attends) else ()
        leaves = ("all-gather",) if computes(self.anatomy.blocks[-1:]) else ()  # the stream is whole again
        partial = any("tp" in self.summed_over(name) for name in trained)
        tied = any("pp" in self.summed_over(name) for name in trained)
        found = {
            "dp": ("all-reduce",) if layout.dp > 1 else (),
            "fsdp": ("all-gather", "reduce-scatter") if layout.fsdp > 1 else (),
            "cp": tuple(dict.fromkeys([*attention, *leaves])) if layout.cp > 1 else (),
            "tp": (*(sequence_parallel if computes(self.plan.rows) else ()), *(("all-to-all",) if partial else ())),
            "pp": ("send", *(("all-to-all",) if tied else ())) if layout.pp > 1 else (),
            "ep": ("all-to-all",) if layout.ep > 1 and computes(self.anatomy.experts) else (),
        }
        return {axis: kinds for axis, kinds in found.items() if kinds}

    def owned(self, grid: Grid) -> Iterator[tuple[Placed, int]]:
        """The weights that a rank has a part in, each with how many elements of it the rank owns."""
        for one in self.weights.values():
            if one.here(grid):
                yield one, one.rows(grid).size.numel()


SHARDABLE = {torch.uint8, torch.int8, torch.int32, torch.int64}
"""Whole numbers that every backend's collectives know."""


def _offloaded(model: nn.Module, layout: Layout, stages: Stages | None) -> Iterator[str]:
    """Weights whose state is the host's: of each rank of ``pp`` the first ones, until they are as many as it says."""
    if layout.offload == "none":
        return
    for rank in range(layout.pp):
        here = [(n, w.numel()) for n, w in model.named_parameters() if stages is None or rank in stages.holders(n)]
        left = sum(count for _, count in here) * layout.offload_percent / 100
        for name, count in here:
            if left > 0:
                yield name
            left -= count


def _policy(weight: nn.Parameter, cut: Cut | None, layout: Layout, dtypes: Dtypes, offloaded: bool) -> StoragePolicy:
    """What is trained is kept in the run's dtype. What is not is kept as it is, where it is computed with as it is."""
    axes: tuple[str, ...] = EXPERT_SHARD if cut is not None and cut.axis == "ep" else SHARD
    number = weight.is_floating_point()
    narrow = not weight.requires_grad and weight.dtype == dtypes.compute
    if not number and weight.dtype not in SHARDABLE:
        axes = ()
    ranks = layout.fsdp * layout.cp // (layout.ep if axes == EXPERT_SHARD else 1)
    return StoragePolicy(
        dtype=weight.dtype if narrow or not number else dtypes.parameter,
        compute=dtypes.compute if number else weight.dtype,
        axes=axes,
        offloaded=offloaded,
        always_whole=not (offloaded and layout.offload == "params") and (layout.zero < 3 or ranks == 1),
        trainable=weight.requires_grad,
    )


def check_blocks(layout: Layout, anatomy: Anatomy) -> None:
    """Refuse what works on blocks where there are none."""
    for name, wanted in (("recompute", layout.recompute), ("compile", layout.compile)):
        if wanted != "none" and not anatomy.blocks:
            raise WrongUse(
                f"{name}={wanted} works block by block, and no repeated blocks were found in the model. "
                f"Name them in Task.anatomy, e.g. Anatomy.of(model, blocks='trunk.*'), or leave {name} out."
            )


def check_exact(layout: Layout, model: nn.Module) -> None:
    """Refuse what mixes samples that other ranks have."""
    for name, module in model.named_modules():
        if layout.exact and isinstance(module, batchnorm.KINDS):
            raise WrongUse(
                f"exact={layout.exact} computes each virtual micro-batch by itself, and {name} "
                f"({type(module).__name__}) needs all ranks' samples. Use a norm without the batch, or leave exact out."
            )
