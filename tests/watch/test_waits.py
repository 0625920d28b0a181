"""Who waits for whom, in records of ranks."""

from __future__ import annotations

import pytest

from phalanx.flight import OUTSIDE
from phalanx.watch.waits import Waits, sides
from tests.watch.records import Scribe, flights


def test_who_is_at_the_end_of_all_waits_is_named() -> None:
    """Rank 0 waits for rank 1 on one axis, which waits for rank 2 on another."""

    def write(rank: int, scribe: Scribe) -> None:
        if rank < 2:
            scribe.collective("dp a")
        if rank > 0:
            scribe.collective("tp b")
        if rank == 0:
            scribe.collective("dp a", waits=None)
        if rank == 1:
            scribe.collective("tp b", waits=None)

    waits = Waits(flights(3, write))
    assert {rank: launch.name for rank, launch in waits.inside.items()} == {
        0: "all-reduce 2 on dp",
        1: "all-reduce 2 on tp",
    }
    assert waits.awaited == {0: [1], 1: [2]}
    assert waits.culprits() == {2: [0, 1]}
    assert not waits.ring()
    assert not waits.apart()
    assert waits.unknown(waits.inside[0]) == 0


def test_a_ring_has_no_end() -> None:
    def write(rank: int, scribe: Scribe) -> None:
        for group in ("dp a", "tp b"):
            scribe.collective(group)
        scribe.collective(("dp a", "tp b")[rank], waits=None)

    waits = Waits(flights(2, write))
    assert not waits.culprits()
    assert waits.ring() == [0, 1]


def test_what_most_ranks_brought_comes_first() -> None:
    def write(rank: int, scribe: Scribe) -> None:
        scribe.collective("dp a", ranks=3)
        scribe.collective("dp a", ranks=3, size=5 if rank == 1 else 4)
        scribe.collective("dp a", ranks=3, kind="all-gather" if rank == 1 else "all-reduce")

    launches = Waits(flights(3, write)).apart()
    assert [each.sequence for each in launches] == [2, 2, 2]
    (_, most), (_, other) = sides(launches)
    assert [each.rank for each in most] == [0, 2]
    assert [(each.rank, each.shape) for each in other] == [(1, (5,))]


def test_other_groups_along_the_axis_tell_which_of_two_is_right() -> None:
    def write(rank: int, scribe: Scribe) -> None:
        scribe.collective(f"tp {rank // 2}", size=5 if rank == 2 else 4)

    waits = Waits(flights(4, write))
    launches = waits.apart()
    assert [each.rank for each in launches] == [2, 3]
    (count, most), (_, other) = sides(launches, waits.alike(launches))
    assert (count, most[0].rank, other[0].rank) == (3, 3, 2)


@pytest.mark.parametrize(("calls", "odd"), [((2,), 2), ((0, 1, 3), 2)])
def test_who_alone_calls_a_collective_of_torchs_or_alone_does_not_is_the_odd_one(
    calls: tuple[int, ...], odd: int
) -> None:
    def write(rank: int, scribe: Scribe) -> None:
        scribe.collective("dp a", ranks=4)
        scribe.collective(f"{OUTSIDE} 0" if rank in calls else "dp a", waits=None, ranks=4)

    waits = Waits(flights(4, write))
    assert not waits.culprits()
    assert waits.odd_one(waits.ring()) == odd


def test_nobody_is_odd_where_two_axes_are_taken_in_two_orders() -> None:
    def write(rank: int, scribe: Scribe) -> None:
        for group in (f"dp {rank % 2}", f"tp {rank // 2}"):
            scribe.collective(group)
        scribe.collective(f"dp {rank % 2}" if rank in (0, 3) else f"tp {rank // 2}", waits=None)

    waits = Waits(flights(4, write))
    assert len(waits.ring()) == 4
    assert waits.odd_one(waits.ring()) is None


def test_what_may_differ_between_ranks_is_not_apart() -> None:
    def write(rank: int, scribe: Scribe) -> None:
        scribe.collective("ep a", kind="all-to-all", size=3 + rank)
        scribe.collective("ep a", kind="words", size=30 + rank)
        scribe.collective("ep a", kind=("send", "receive")[rank])

    assert not Waits(flights(2, write)).apart()


def test_without_records_nothing_is_known() -> None:
    waits = Waits({})
    assert (waits.culprits(), waits.ring(), waits.apart()) == ({}, [], [])
