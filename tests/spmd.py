"""Our collectives and weights as spmd_types has them: what a tensor is on each axis, checked without other ranks.

In its words a tensor is R (replicated), I (invariant), V (varying; S(dim), where that is a shard of a dim) or P
(partial), and so is its gradient: P of what is R, I of I, V of V, R of P.

A rank of a fake process group computes with its own part; what comes from others is no number to be relied on, only its
type is. ``whole=True`` follows which dim an axis shards and finds that a product over a sharded dim is partial. It
cannot be had where ranks hold what is no even run of a dim, as the positions of context parallelism: there what varies
is taken for partial where it is summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.testing._internal.distributed.fake_pg  # registers the backend
from torch import Tensor, nn
from torch.autograd import Function

from phalanx.anatomy import Anatomy
from phalanx.kernels.linear_cross_entropy import LinearCrossEntropy
from phalanx.layout import Layout
from phalanx.parallel.axes import context, overlap, tensor
from phalanx.parallel.blocks.boundary import SequenceSharding
from phalanx.parallel.communication import differentiable
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.mesh import Grid, Mesh
from phalanx.parallel.forward.activations import ActivationLayout
from phalanx.parallel.forward.calls import about_sizes
from phalanx.parallel.randomness.answers import Answers
from phalanx.parallel.spread import Spread
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.parallel.weights.placement import Placement
from phalanx.precision import DTYPES
from phalanx.trees import leaves

spmd = pytest.importorskip("spmd_types", reason="spmd_types is not installed: pip install spmd_types")
checker = pytest.importorskip("spmd_types.checker")
if tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2]) < (2, 13):
    pytest.skip("its rules for torch before 2.13 do not know all that we call", allow_module_level=True)
from spmd_types import I, P, R, S, V, rules  # noqa: E402

BATCH, TIME = 2, 8
SAME = {"replicated": R, "invariant": I}


class Axes:
    """The axes of a layout along which activations and weights differ, as spmd_types names them."""

    def __init__(self, layout: Layout, whole: bool) -> None:
        grid = Grid(layout, 0)
        self.whole = whole
        self.named = {
            axis: spmd.MeshAxis.of(len(ranks), ranks[1] - ranks[0])
            for axis in ("cp", "tp")
            if len(ranks := grid.members((axis,))) > 1
        }

    def of(self, group: Communicator) -> Any:
        return self.named[group.name]

    def term(self, x: Tensor, group: Communicator) -> Any:
        """What a sum over ranks takes: what is partial; where dims are not followed, also what varies."""
        return V if not self.whole and spmd.maybe_get_axis_local_type(x, self.of(group)) is V else P


def typed(axes: Axes) -> dict[type, Callable[..., Any]]:
    """By function, how it changes what a tensor is: as its docstring in `differentiable` says."""

    def all_gather(*, x: Tensor, dim: int, group: Communicator, to: str) -> Any:
        return rules.all_gather(x, axes.of(group), src=S(dim), dst=SAME[to])

    def reduce_scatter(*, x: Tensor, dim: int, group: Communicator) -> Any:
        return rules.reduce_scatter(x, axes.of(group), src=axes.term(x, group), dst=S(dim))

    def shard(*, x: Tensor, dim: int, group: Communicator) -> Any:
        return rules.convert(x, axes.of(group), src=I, dst=S(dim))

    def all_reduce(*, x: Tensor, group: Communicator, to: str) -> Any:
        return rules.all_reduce(x, axes.of(group), src=axes.term(x, group), dst=SAME[to])

    def replicate(*, x: Tensor, group: Communicator) -> Any:
        return rules.convert(x, axes.of(group), src=I, dst=R)

    def same(*, x: Tensor) -> Any:
        return rules.einsum("...->...", x, linear_in=(0,))

    def same_weight(*, weight: Tensor) -> Any:
        return same(x=weight)

    def linear(*, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        found = rules.einsum("bti,oi->bto", x, weight)
        return found if bias is None else rules.einsum("bto,o->bto", found, bias)

    def scattered_linear(*, x: Tensor, weight: Tensor, group: Communicator) -> Any:
        return reduce_scatter(x=linear(x=x, weight=weight, bias=None), dim=1, group=group)

    def all_to_all(*, x: Tensor, group: Communicator) -> Any:
        return rules.all_to_all(x, axes.of(group), src=V, dst=V)

    def all_gather_rows(*, x: Tensor, group: Communicator) -> Any:
        return rules.all_gather(x, axes.of(group), src=S(0), dst=R)

    def cross_entropy(*, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, vocabulary: Any) -> Any:
        logits = rules.einsum("nd,vd->nv", hidden, weight)
        if bias is not None:
            logits = rules.einsum("nv,v->nv", logits, bias)
        total = rules.einsum("nv,n->", logits, targets)
        if vocabulary is None:
            return total
        return rules.all_reduce(total, axes.named["tp"], src=P if axes.whole else V, dst=I)

    return {
        differentiable.Awaited: same,
        overlap._LateAlias: same_weight,
        overlap._LateLinear: linear,
        overlap._ScatteredLinear: scattered_linear,
        differentiable.AllGather: all_gather,
        differentiable.ReduceScatter: reduce_scatter,
        differentiable.Shard: shard,
        differentiable.AllReduce: all_reduce,
        differentiable.Replicate: replicate,
        differentiable.AllToAll: all_to_all,
        differentiable.AllToAllRows: all_to_all,
        differentiable.AllGatherRows: all_gather_rows,
        LinearCrossEntropy: cross_entropy,
    }


@contextmanager
def checking(layout: Layout, *, whole: bool) -> Iterator[Axes]:
    """While this lasts, every operation is checked, our collectives by the types of `typed`."""
    axes = Axes(layout, whole)
    with pytest.MonkeyPatch.context() as patch, spmd.set_current_mesh(axes.named):
        for function, rule in typed(axes).items():
            patch.setattr(function, "spmd_typecheck", staticmethod(rule), raising=False)
        patch.setattr(Answers, "__torch_function__", _past(Answers.__torch_function__, whole))
        for module in (context, tensor):
            patch.setattr(module, "about_sizes", _about_sizes)
        patch.setattr(SequenceSharding, "layout", _varying(SequenceSharding.layout, axes))
        with checker.typecheck(local=not whole):
            yield axes


def _about_sizes(error: Exception) -> bool:
    """What the checker says is not to be answered by gathering what does not fit."""
    return not isinstance(error, spmd.SpmdTypeError) and about_sizes(error)


class _Attention(Function):
    """Attention, for which the checker does not know which dims may be sharded."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, rest: tuple[Any, ...], how: Any) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, *rest, **how)

    @staticmethod
    def spmd_typecheck(*, query: Tensor, key: Tensor, value: Tensor) -> Any:
        shared = spmd.get_partition_spec(key) is None  # one head of keys for all ranks' queries
        return rules.einsum("bhq_,b___,b___->bhq_" if shared else "bhq_,bh__,bh__->bhq_", query, key, value)


def _past(answer: Callable[..., Any], whole: bool) -> Callable[..., Any]:
    """`Answers` that hands on autograd functions so that the checker, which it stands before, is asked too."""

    def answered(self: Answers, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        owner = getattr(func, "__self__", None)
        if isinstance(owner, type) and issubclass(owner, Function):
            return owner.apply(*args)
        if whole and func is F.scaled_dot_product_attention:
            return _Attention.apply(*args[:3], args[3:], kwargs or {})
        return answer(self, func, types, args, kwargs)

    return answered


def _varying(layout: Callable[..., ActivationLayout], axes: Axes) -> Callable[..., ActivationLayout]:
    """Which positions a rank of cp has is made by arithmetic with its rank, which the checker does not see."""

    def made(self: SequenceSharding, length: int) -> ActivationLayout:
        found = layout(self, length)
        if found.positions is None:
            return found
        return replace(found, positions=varying(found.positions.clone(), axes))

    return made


def varying(x: Tensor, axes: Axes) -> Tensor:
    """What the checker took for the same on all ranks of cp."""
    return spmd.mutate_type(x, axes.named["cp"], src=R, dst=V)


@contextmanager
def fake_world(layout: Layout, rank: int = 0) -> Iterator[Mesh]:
    """A rank of a layout, whose collectives are no sooner launched than done."""
    dist.init_process_group("fake", rank=rank, world_size=layout.world, store=dist.HashStore())
    try:
        yield Mesh(layout, rank, timedelta(seconds=60))
    finally:
        dist.destroy_process_group()


@contextmanager
def spread(build: Callable[[], nn.Module], layout: Layout, rank: int = 0) -> Iterator[Spread]:
    """A model spread by a layout, as it is on a rank."""
    with fake_world(layout, rank) as mesh:
        blueprint = Blueprint(build, 0)
        placement = Placement.of(blueprint.model, Anatomy.of(blueprint.model), layout)
        made = Spread(blueprint, placement, mesh, DTYPES["fp32"], torch.device("cpu"), 0)
        made.moment.slots = np.arange(BATCH)
        if made.context is not None:  # it fills the order of positions in place, where the checker would lose track
            with made.activations.handed(made.sharding.layout(TIME)):
                made.context.whole(torch.empty(BATCH, made.activations.stream.held), 1)
        try:
            yield made
        finally:
            made.reduction.close()


def state(spread: Spread, name: str, axis: str) -> Any:
    """What a weight is on an axis, by how it is cut and whether a step sums its gradient over the axis."""
    cut = spread.plan.cuts.get(name)
    if cut is not None and cut.axis == axis and len(set(cut.spans)) > 1:
        return S(cut.dim)
    summed = len(spread.holding.adding(name)) > 1 if axis == "tp" else axis in spread.placement.summed_over(name)
    return R if summed else I


def annotate(spread: Spread, axes: Axes, others: Mapping[str, Any] | None = None) -> None:
    """Tell the checker what weights and buffers are; ``others``: of some weights, what to say of them on all axes."""
    for name, weight in spread.model.named_parameters():
        said = (others or {}).get(name)
        spmd.assert_type(weight, {axis: said or state(spread, name, called) for called, axis in axes.named.items()})
    known = list(spread.model.buffers())
    if spread.context is not None:
        known += leaves(vars(spread.context))
    if spread.tensor is not None:
        known += [columns.order for columns in spread.tensor.columns.values()]
        known += leaves([(inside.features, inside.heads) for inside in spread.tensor.containers.values()])
    if spread.pipeline is not None:  # what stands for modules of other stages
        known += [w for shadow in leaves(vars(spread.pipeline), nn.Module) for w in shadow.parameters()]
    for same in known:
        given(same, axes)


def given(x: Tensor, axes: Axes, **states: Any) -> Tensor:
    """A tensor that is what ``states`` say by axis, else the same on all ranks."""
    return spmd.assert_type(x, {axis: states.get(called, R) for called, axis in axes.named.items()})
