"""The mesh: who stands where, and groups with a name and a timeout of their own."""

from __future__ import annotations

from datetime import timedelta
from graphlib import TopologicalSorter
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from phalanx import Layout
from phalanx.parallel.communication.mesh import AXES, EXPERT_SHARD, EXPERTS, GROUPS, SHARD, Grid, Members, Mesh
from phalanx.parallel.torch_private import new_group
from tests.ranks import Ranks


def facts() -> dict[str, object]:
    mesh = Mesh(Layout(dp=2, fsdp=2), dist.get_rank(), timedelta(seconds=17))
    found: dict[str, object] = {"place": (mesh.coordinates["dp"], mesh.coordinates["fsdp"])}
    for axes in (("dp",), ("fsdp", "cp"), ("dp", "fsdp")):
        group = mesh.group(*axes)
        total = torch.tensor([float(dist.get_rank())])
        group.all_reduce(total).wait()
        timeout = group._group._get_backend(torch.device("cpu")).options._timeout
        found["x".join(axes)] = (mesh.members(axes), mesh.index(*axes), total.item(), group.name, timeout)
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
    for group in groups:
        group.all_gather_words([])  # nobody closes a connection that another has yet to make
    mesh.close()
    return [None if group.alone else group.name for group in groups]


def test_groups_of_the_same_ranks_are_told_apart_by_what_they_are_for(ranks: Ranks) -> None:
    assert ranks(4, names, Layout(cp=4, ep=2))[0] == ["fsdpxcp", "cp", "ep", "fsdpxcp of experts", "fsdpxcp"]
    assert ranks(4, names, Layout(fsdp=4))[0] == ["fsdp", None, None, "fsdp", "fsdp"]
    assert ranks(4, names, Layout(fsdp=2, cp=2, ep=4))[0] == ["fsdpxcp", "cp", "ep", None, "fsdpxcp"]


def test_a_rank_alone_has_no_groups() -> None:
    mesh = Mesh(Layout(), 0, timedelta(seconds=1))
    assert mesh.world.alone
    assert mesh.group("dp").alone
    assert mesh.size("dp", "fsdp") == 1
    mesh.close()


def made(layout: Layout, rank: int) -> list[Members]:
    """The groups a rank makes, in order."""
    grid = Grid(layout, rank)
    return list(dict.fromkeys([*grid.groups().values(), *grid.lanes().values()]))


@pytest.mark.parametrize("layout", [
    "dp=2,fsdp=3,tp=2,pp=3", "fsdp=2,cp=4,ep=2,tp=2", "pp=5,dp=2,schedule=interleaved", "pp=2,schedule=interleaved",
    "pp=4,fsdp=2,tp=2,ep=2,schedule=interleaved", "fsdp=4,cp=2,ep=4", "dp=6",
])  # fmt: skip
def test_members_make_the_same_groups_in_one_order(layout: str) -> None:
    """Each rank waits at each of its groups until all members are there: in an order without circles, they come."""
    parsed = Layout.parse(layout)
    orders = {rank: made(parsed, rank) for rank in range(parsed.world)}
    after: dict[Members, set[Members]] = {}
    for rank, groups in orders.items():
        for group in groups:
            assert rank in group.ranks
            assert all(group in orders[other] for other in group.ranks)
        for before, group in pairwise(groups):
            after.setdefault(group, set()).add(before)
    list(TopologicalSorter(after).static_order())
    assert len({group.name for groups in orders.values() for group in groups}) == len(set().union(*orders.values()))


@pytest.mark.parametrize("layout", ["dp=2,fsdp=3,cp=2,tp=2,pp=3", "fsdp=2,cp=4,ep=2,tp=2", "fsdp=4,cp=2,ep=8", "dp=6"])
def test_a_place_is_that_among_the_members(layout: str) -> None:
    parsed = Layout.parse(layout)
    for grid in (Grid(parsed, rank) for rank in range(parsed.world)):
        for axes in (*GROUPS, ("fsdp", "cp", "tp")):
            assert grid.members(axes)[grid.index(*axes)] == grid.rank
            assert len(grid.members(axes)) == grid.size(*axes)


def test_a_rank_of_ten_thousand_makes_a_dozen_groups() -> None:
    layout = Layout(pp=8, dp=20, fsdp=8, tp=8, schedule="interleaved")
    groups = made(layout, 5_000)
    assert len(groups) == 10
    assert sorted(len(group.ranks) for group in groups) == [2, 2, 2, 2, 8, 8, 8, 20, 160, 10_240]


def some_make_one() -> str:
    """Ranks 1 and 3 alone; nobody else takes part."""
    rank = dist.get_rank()
    if rank not in (1, 3):
        return ""
    total = torch.tensor([float(rank)])
    for number in range(2):  # again, as a second engine does: under the old name it would find the old addresses
        group = new_group((1, 3), rank, f"of two, {number}", timedelta(seconds=17), "two", None)
        dist.all_reduce(total, group=group)
        dist.destroy_process_group(group)
    return f"{total.item():.0f}"


def test_a_group_is_made_by_its_members_alone(ranks: Ranks) -> None:
    assert ranks(4, some_make_one) == ["", "8", "", "8"]


def several(layouts: list[Layout]) -> list[float]:
    found = []
    for layout in layouts:
        mesh = Mesh(layout, dist.get_rank(), timedelta(seconds=17))
        total = torch.ones(1)
        mesh.world.all_reduce(total).wait()
        found.append(total.item())
        mesh.close()
    return found


def test_one_mesh_after_another(ranks: Ranks) -> None:
    layouts = [Layout(dp=2, pp=2), Layout(dp=2, pp=2), Layout(fsdp=2, cp=2, ep=2), Layout(dp=4), Layout(dp=2, pp=2)]
    assert ranks(4, several, layouts) == [[4.0] * 5] * 4


def joint(layout: Layout) -> tuple[str | None, bool, float]:
    mesh = Mesh(layout, dist.get_rank(), timedelta(seconds=17))
    group = mesh.joint("fsdp", "cp", "tp")
    known = any(group is mesh.group(*axes) for axes in (SHARD, ("tp",), AXES))
    total = torch.tensor([float(dist.get_rank())])
    group.all_reduce(total).wait()
    assert group.alone or mesh.joint("fsdp", "cp", "tp") is group
    mesh.close()
    return None if group.alone else group.name, known or group.alone, total.item()


def test_axes_that_few_speak_along_together_share_a_group_where_there_is_one(ranks: Ranks) -> None:
    assert ranks(4, joint, Layout(fsdp=4))[1] == ("fsdp", True, 6.0)
    assert ranks(4, joint, Layout(tp=2, dp=2))[3] == ("tp", True, 5.0)
    assert ranks(4, joint, Layout(fsdp=2, tp=2))[0] == ("world", True, 6.0)
    assert ranks(4, joint, Layout(dp=2, pp=2))[2] == (None, True, 2.0)
    assert ranks(8, joint, Layout(dp=2, fsdp=2, tp=2))[5] == ("fsdpxtp", False, 22.0)


def test_sites_are_outermost_and_their_ranks_neighbours() -> None:
    layout = Layout.parse("dp=2,pp=2,fsdp=2,comm=local:4")
    grids = [Grid(layout, rank) for rank in range(8)]
    assert [(g.coordinates["dp"], g.coordinates["pp"], g.coordinates["fsdp"]) for g in grids[3:6]] == [
        (0, 1, 1), (1, 0, 0), (1, 0, 1),
    ]  # fmt: skip
    assert grids[6].members(("dp",)) == (2, 6)
    site = Grid(layout.site, 6)
    assert site.members(AXES) == (4, 5, 6, 7)
    assert site.members(("pp",)) == (4, 6)
    assert (site.index(*AXES), site.index("pp"), site.size(*AXES), site.members(("dp",))) == (2, 1, 4, (6,))


def of_a_site() -> tuple[list[str], bool, float]:
    layout = Layout.parse("dp=2,fsdp=2,comm=local:4")
    mesh = Mesh(layout, dist.get_rank(), timedelta(seconds=17))
    site = mesh.site(layout)
    total = torch.tensor([float(dist.get_rank())])
    site.world.all_reduce(total).wait()
    found = [site.world.name, mesh.world.name, site.group("dp").name]
    shared = site.group(*SHARD) is mesh.group(*SHARD) and site.everybody is mesh and site.group("dp").alone
    mesh.world.all_gather_words([])
    mesh.close()
    return found, shared, total.item()


def test_a_site_is_a_mesh_of_its_own(ranks: Ranks) -> None:
    assert ranks(4, of_a_site) == [(["fsdp", "dpxfsdp", ""], True, total) for total in (1.0, 1.0, 5.0, 5.0)]
