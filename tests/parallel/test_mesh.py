"""The mesh: who stands where, and groups with a name and a timeout of their own."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from phalanx import Layout
from phalanx.parallel.mesh import AXES, EXPERT_SHARD, EXPERTS, SHARD, Mesh
from tests.ranks import Ranks


def facts() -> dict[str, object]:
    mesh = Mesh(Layout(dp=2, fsdp=2), dist.get_rank(), timedelta(seconds=17))
    found: dict[str, object] = {"place": (mesh.coordinates["dp"], mesh.coordinates["fsdp"])}
    for axes in (("dp",), ("fsdp", "cp"), ("dp", "fsdp")):
        group = mesh.group(*axes)
        total = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(total, group=group)
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        found["x".join(axes)] = (mesh.members(axes), mesh.index(*axes), total.item(), group.group_desc, timeout)
    found["world is the batch"] = mesh.world is mesh.group("dp", "fsdp")
    mesh.close()
    return found


def test_groups_have_names_timeouts_and_the_right_members(ranks: Ranks) -> None:
    answers = ranks(4, facts)
    assert [answer["place"] for answer in answers] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    timeout = timedelta(seconds=17)
    assert answers[3]["dp"] == ((1, 3), 1, 4.0, "dp", timeout)
    assert answers[3]["fsdpxcp"] == ((2, 3), 1, 5.0, "fsdp", timeout)
    assert answers[2]["dpxfsdp"] == ((0, 1, 2, 3), 2, 6.0, "dpxfsdp", timeout)
    assert all(answer["world is the batch"] for answer in answers)


def names(layout: Layout) -> list[str | None]:
    mesh = Mesh(layout, dist.get_rank(), timedelta(seconds=17))
    groups = [mesh.group(*axes) for axes in (SHARD, ("cp",), EXPERTS, EXPERT_SHARD, AXES)]
    mesh.close()
    return [group.group_desc if group else None for group in groups]


def test_groups_of_the_same_ranks_are_told_apart_by_what_they_are_for(ranks: Ranks) -> None:
    assert ranks(4, names, Layout(cp=4, ep=2))[0] == ["fsdpxcp", "cp", "ep", "fsdpxcp of experts", "fsdpxcp"]
    assert ranks(4, names, Layout(fsdp=4))[0] == ["fsdp", None, None, "fsdp", "fsdp"]
    assert ranks(4, names, Layout(fsdp=2, cp=2, ep=4))[0] == ["fsdpxcp", "cp", "ep", None, "fsdpxcp"]


def test_a_rank_alone_has_no_groups() -> None:
    mesh = Mesh(Layout(), 0, timedelta(seconds=1))
    assert mesh.world is None
    assert mesh.group("dp") is None
    assert mesh.size("dp", "fsdp") == 1
    mesh.close()
