"""Whole matrices: shared out evenly and alike on all ranks; their parts are all of them, once."""

from __future__ import annotations

import pytest
import torch

from phalanx import Layout
from phalanx.parallel.axes.cuts import Cut
from phalanx.parallel.communication.mesh import EXPERT_SHARD, SHARD, Grid
from phalanx.parallel.weights.matrices import COPY, MatrixPart, cost, distinct, owners
from phalanx.parallel.weights.placement import Placed, StoragePolicy

CUTS = {
    "none": None,
    "rows": Cut(0, (((0, 4),), ((4, 7),))),
    "columns": Cut(1, (((0, 2),), ((2, 5),))),
    "joined rows": Cut(0, (((0, 2), (4, 6)), ((2, 4), (6, 7)))),
    "held alike": Cut(0, (((0, 7),), ((0, 7),))),
}


def placed(shape: tuple[int, ...], cut: Cut | None) -> Placed:
    axes = EXPERT_SHARD if cut is not None and cut.axis == "ep" else SHARD
    policy = StoragePolicy(torch.float32, torch.float32, axes, offloaded=False, always_whole=False, trainable=True)
    return Placed("one", torch.Size(shape), policy, cut, (0,))


def put_together(layout: str, cut: Cut | None, whole: torch.Tensor) -> None:
    """Each part taken out of the whole and laid where it belongs gives the whole, and each element once."""
    parsed, one = Layout.parse(layout), placed(tuple(whole.shape), cut)
    members = [Grid(parsed, rank) for rank in Grid(parsed, 0).members(COPY)]
    again, times, seen = torch.zeros_like(whole), torch.zeros_like(whole), []
    for part, holders in distinct(one, members):
        ones = torch.zeros_like(whole)
        assert all(MatrixPart.of(one, members[holder]).rows == part.rows for holder in holders)
        part.put(part.take(whole), again)
        part.put(torch.ones(part.numel), ones)
        times += ones
        seen += holders
    assert torch.equal(again, whole)
    assert times.eq(1).all()
    assert sorted(seen) == list(range(len(members)))


@pytest.mark.parametrize("layout", ["tp=2", "fsdp=2,tp=2", "fsdp=3,cp=2,tp=2", "dp=2,fsdp=8,tp=2,pp=2"])
@pytest.mark.parametrize("name", CUTS)
def test_parts_are_the_whole(name: str, layout: str) -> None:
    put_together(layout, CUTS[name], torch.arange(70.0).view(7, 5, 2))


@pytest.mark.parametrize("layout", ["fsdp=2,ep=2", "fsdp=2,cp=2,tp=2,ep=2", "fsdp=6,ep=2"])
def test_parts_of_stacked_experts(layout: str) -> None:
    put_together(layout, Cut(0, (((0, 4),), ((4, 8),)), "ep"), torch.arange(8 * 3 * 2.0).view(8, 3, 2))


def test_one_number_and_nothing() -> None:
    for whole in (torch.tensor(3.0), torch.zeros(0, 4)):
        put_together("fsdp=2", None, whole)


def test_work_is_shared_out_evenly() -> None:
    block = {"up": (64, 256), "down": (256, 64), "out": (64, 64), "norm": (64,)}
    shapes = {f"{number}.{name}": torch.Size(shape) for number in range(8) for name, shape in block.items()}
    shapes["embedding"] = torch.Size((512, 64))
    owner = owners(shapes, {name: [0] for name in shapes}, 4)
    assert owner == owners(dict(reversed(shapes.items())), {name: [0] for name in shapes}, 4)
    loads = [sum(cost(shape) for name, shape in shapes.items() if owner[name] == member) for member in range(4)]
    assert max(loads) < 1.1 * sum(loads) / 4


def test_a_weight_of_several_stages_has_one_owner() -> None:
    shapes = {name: torch.Size((4, 4)) for name in "abcdef"}
    stages = {"a": [0], "b": [0], "c": [1], "d": [1], "e": [0, 1], "f": [2]}
    owner = owners(shapes, stages, 2)
    for stage in (0, 1):
        own = [owner[name] for name in shapes if stage in stages[name]]
        assert sorted(own.count(member) for member in (0, 1)) == [1, 2]


def test_cost() -> None:
    assert cost(torch.Size((4, 10))) == cost(torch.Size((10, 4))) == 160
    assert cost(torch.Size((7,))) == 7
    assert cost(torch.Size(())) == 1
    assert cost(torch.Size((0, 3))) == 0
