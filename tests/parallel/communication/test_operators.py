"""Collectives as operators: what a compiler is told of them is so. Inside of compiled blocks: tests/parallel/blocks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx import Layout
from phalanx.parallel.communication import operators
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.mesh import Mesh
from phalanx.parallel.communication.narrow import Narrow
from phalanx.parallel.torch_private import FakeTensorMode
from tests.ranks import Ranks


def kinds(group: Communicator, kind: str) -> dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]:
    """By name: the operator, and the plain function; what they send is as narrow as ``kind`` says."""
    name, ops, narrow = group.handle, torch.ops.phalanx, Narrow(kind)
    return {
        "all_gather": (
            lambda x: ops.all_gather(x, name, 2, x, kind),
            lambda x: operators.all_gathered(x, group, None, narrow),
        ),
        "all_reduce": (lambda x: ops.all_reduce(x, name, kind), lambda x: operators.all_reduced(x, group, narrow)),
        "reduce_scatter": (
            lambda x: ops.reduce_scatter(x, name, kind),
            lambda x: operators.reduce_scattered(x, group, narrow),
        ),
        "all_to_all": (lambda x: ops.all_to_all(x, name, kind), lambda x: operators.exchanged(x, group, narrow)),
    }


def compared(kind: str) -> Any:
    mesh = Mesh(Layout(tp=2), dist.get_rank(), timedelta(seconds=30))
    x = torch.arange(24.0).view(2, 3, 4) + 100 * dist.get_rank()
    found = []
    for operator, plain in kinds(mesh.group("tp"), kind).values():
        calls, results = [mesh.traffic.calls.copy()], []
        for function in (operator, plain):
            results.append(function(x))
            calls.append(mesh.traffic.calls.copy())
        with FakeTensorMode() as fake:
            told = operator(fake.from_tensor(x))
        found.append((*results, (told.shape, told.dtype, told.stride()), calls[1] - calls[0], calls[2] - calls[1]))
    mesh.close()
    return found


@pytest.mark.parametrize("kind", ["exact", "fp8"])
def test_operators_are_the_collectives_and_have_the_shapes_they_say(ranks: Ranks, kind: str) -> None:
    for operator, plain, told, counted, calls in (each for answer in ranks(2, compared, kind) for each in answer):
        assert torch.equal(operator, plain)
        assert told == (operator.shape, operator.dtype, operator.stride())
        assert counted == calls
        assert sum(calls.values()) == 1 or (kind == "fp8" and sum(calls.values()) == 2)  # to sum, and tell all


def handles() -> list[str]:
    meshes = [Mesh(Layout(tp=2), dist.get_rank(), timedelta(seconds=30)) for _ in range(2)]
    found = [mesh.group("tp").handle for mesh in meshes]
    for mesh in meshes:
        mesh.close()
    after = Mesh(Layout(tp=2), dist.get_rank(), timedelta(seconds=30))
    after.close()
    return [*found, after.group("tp").handle]


def test_who_comes_after_another_has_its_programs(ranks: Ranks) -> None:
    for first, second, after in ranks(2, handles):
        assert first == after != second
