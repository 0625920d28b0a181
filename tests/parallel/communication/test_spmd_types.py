"""Our collectives have the types of spmd_types': forward and backward they do the same, and a wrong use is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phalanx.layout import Layout
from phalanx.parallel.communication import differentiable
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.differentiable import (
    all_gather,
    all_gather_rows,
    all_reduce,
    all_to_all,
    all_to_all_rows,
    reduce_scatter,
    replicate,
    shard,
)
from phalanx.parallel.communication.traffic import Traffic
from tests.ranks import Ranks
from tests.spmd import Axes, I, P, R, S, V, checking, fake_world, given, spmd, typed

RANKS, SHAPE = 2, (2, 4, 6)
Collective = Callable[[Tensor, Communicator], Tensor]
OURS: dict[str, tuple[Any, Any, Collective]] = {
    "all_gather to replicated": (S(1), R, lambda x, group: all_gather(x, 1, 4 * group.size, group, to="replicated")),
    "all_gather to invariant": (S(1), I, lambda x, group: all_gather(x, -2, 4 * group.size, group, to="invariant")),
    "reduce_scatter": (P, S(1), lambda x, group: reduce_scatter(x, 1, group)),
    "shard": (I, S(2), lambda x, group: shard(x, -1, group)),
    "all_reduce to replicated": (P, R, lambda x, group: all_reduce(x, group, to="replicated")),
    "all_reduce to invariant": (P, I, lambda x, group: all_reduce(x, group, to="invariant")),
    "replicate": (I, R, replicate),
    "all_to_all": (V, V, all_to_all),
    "all_to_all_rows": (V, V, lambda x, group: all_to_all_rows(x, (1, 1), (1, 1), group)),
    "all_gather_rows": (S(0), R, lambda x, group: all_gather_rows(x, (2, 2), group, counts=True)),
}
"""By name: what each takes, what it gives, and a call."""


def theirs(name: str, x: Tensor, group: dist.ProcessGroup) -> Tensor:
    source, target, _ = OURS[name]
    if name.startswith("all_gather"):
        return spmd.all_gather(x, group, src=source, dst=target)
    if name.startswith("all_to_all"):
        return spmd.all_to_all(x, group, src=V, dst=V, split_dim=0, concat_dim=0)
    if name == "reduce_scatter":
        return spmd.reduce_scatter(x, group, src=source, dst=target)
    if name.startswith("all_reduce"):
        return spmd.all_reduce(x, group, src=source, dst=target)
    return spmd.convert(x, group, src=source, dst=target)


def test_every_function_has_its_types() -> None:
    found = {f for f in vars(differentiable).values() if isinstance(f, type) and issubclass(f, Function)} - {Function}
    assert found <= typed(Axes(Layout(tp=RANKS), whole=False)).keys()


# On real ranks


def values(rank: int, kind: Any, what: str) -> Tensor:
    """The same on all ranks where that is what the kind means, or else each rank's own."""
    seed = sum(map(ord, what)) * 10 + (0 if kind in (R, I) else rank + 1)
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


GRADIENT = {R: P, I: I, P: R}
"""Of what is a shard, or varies, the gradient is alike."""


def forward_and_backward(call: Callable[[Tensor], Tensor], rank: int, name: str) -> tuple[Tensor, Tensor]:
    source, target, _ = OURS[name]
    x = values(rank, source, "input").requires_grad_()
    output = call(x)
    big = values(rank, GRADIENT.get(target, V), "gradient").repeat(2, 2, 2)
    output.backward(big[tuple(slice(size) for size in output.shape)].contiguous())
    return output.detach(), x.grad


def compare() -> None:
    world = dist.group.WORLD
    group = Communicator(world, Traffic())
    for name, (_, _, call) in OURS.items():
        own = forward_and_backward(lambda x, call=call: call(x, group), group.rank, name)
        expected = forward_and_backward(lambda x, name=name: theirs(name, x, world), group.rank, name)
        for found, wanted, what in zip(own, expected, ("output", "gradient"), strict=True):
            assert found.shape == wanted.shape, (name, what)
            assert torch.allclose(found, wanted, rtol=0, atol=1e-12), (name, what)


def test_they_do_what_those_of_spmd_types_do(ranks: Ranks) -> None:
    ranks(RANKS, compare)


# Under the checker


@contextmanager
def checked(whole: bool) -> Iterator[tuple[Axes, Communicator]]:
    with fake_world(Layout(tp=RANKS)) as mesh, checking(Layout(tp=RANKS), whole=whole) as axes:
        yield axes, mesh.group("tp")


def tensor(kind: Any, axes: Axes, *shape: int) -> Tensor:
    return given(torch.randn(*(shape or SHAPE), requires_grad=True), axes, tp=kind)


CASES = [
    (name, whole) for name, (source, _, _) in OURS.items() for whole in (False, True) if source is not V or not whole
]
"""With dims, and without; what varies and is no shard of a dim has none."""


@pytest.mark.parametrize(("name", "whole"), CASES)
def test_types(name: str, whole: bool) -> None:
    source, target, call = OURS[name]
    with checked(whole) as (axes, tp):
        output = call(tensor(source, axes), tp)
        spmd.assert_type(output, {axes.named["tp"]: target})
        assert output.requires_grad


@pytest.mark.parametrize(("name", "whole"), CASES)
def test_everything_else_is_refused(name: str, whole: bool) -> None:
    source, _, call = OURS[name]
    with checked(whole) as (axes, tp):
        for other in {R, I, P} - {source}:
            with pytest.raises(spmd.SpmdTypeError, match="expect"):
                call(tensor(other, axes), tp)
        if source in (I, P) and (source is I or whole):
            with pytest.raises(spmd.SpmdTypeError, match="expect"):
                call(tensor(S(0), axes), tp)


def test_another_dim_is_refused() -> None:
    with checked(whole=True) as (axes, tp), pytest.raises(spmd.SpmdTypeError, match="sharded on dim"):
        all_gather(tensor(S(0), axes), 1, 8, tp, to="replicated")


# Wrong uses, each beside the right one


@pytest.mark.parametrize("whole", [False, True])
def test_invariant_where_replicated_is_needed(whole: bool) -> None:
    """Each rank does something else with the stream, and its gradients are not summed."""
    with checked(whole) as (axes, tp):
        stream, columns = tensor(I, axes, 2, 8), tensor(S(0), axes, 3, 8)
        F.linear(replicate(stream, tp), columns)
        with pytest.raises(spmd.SpmdTypeError, match="Invariant"):
            F.linear(stream, columns)


@pytest.mark.parametrize("whole", [False, True])
def test_replicated_where_invariant_is_needed(whole: bool) -> None:
    """All ranks do the same with a sum, and gradients that are the same would be summed."""
    with checked(whole) as (axes, tp):
        terms, norm = tensor(P, axes, 2, 8), tensor(I, axes, 8)
        F.rms_norm(all_reduce(terms, tp, to="invariant"), (8,), norm)
        with pytest.raises(spmd.SpmdTypeError, match="Invariant"):
            F.rms_norm(all_reduce(terms, tp, to="replicated"), (8,), norm)


def test_missing_sum_before_a_nonlinearity() -> None:
    with checked(whole=True) as (axes, tp):
        product = F.linear(tensor(S(1), axes, 2, 4), tensor(S(1), axes, 6, 4))
        F.silu(all_reduce(product, tp, to="replicated"))
        with pytest.raises(spmd.SpmdTypeError, match="non-linear"):
            F.silu(product)


def test_bias_added_on_every_rank() -> None:
    with checked(whole=True) as (axes, tp):
        product, bias = F.linear(tensor(S(1), axes, 2, 4), tensor(S(1), axes, 6, 4)), tensor(I, axes, 6)
        all_reduce(product, tp, to="invariant") + bias
        with pytest.raises(spmd.SpmdTypeError):
            all_reduce(product + bias, tp, to="invariant")
        with pytest.raises(spmd.SpmdTypeError, match="summed N times"):
            all_reduce(product + replicate(bias, tp), tp, to="invariant")


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("to", ["replicated", "invariant"])
def test_doubled_sum(to: Any, whole: bool) -> None:
    with checked(whole) as (axes, tp):
        once = all_reduce(tensor(P, axes), tp, to=to)
        with pytest.raises(spmd.SpmdTypeError, match="expects its input to be P"):
            all_reduce(once, tp, to=to)
        with pytest.raises(spmd.SpmdTypeError, match="expects its input to be P"):
            reduce_scatter(once, 1, tp)
