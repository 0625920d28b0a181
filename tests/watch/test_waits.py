"""Who waits for whom, in records of ranks."""

from __future__ import annotations

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
    most, other = sides(launches)
    assert [each.rank for each in most] == [0, 2]
    assert [(each.rank, each.shape) for each in other] == [(1, (5,))]


def test_what_may_differ_between_ranks_is_not_apart() -> None:
    def write(rank: int, scribe: Scribe) -> None:
        scribe.collective("ep a", kind="all-to-all", size=3 + rank)
        scribe.collective("ep a", kind="words", size=30 + rank)
        scribe.collective("ep a", kind=("send", "receive")[rank])

    assert not Waits(flights(2, write)).apart()


def test_without_records_nothing_is_known() -> None:
    waits = Waits({})
    assert (waits.culprits(), waits.ring(), waits.apart()) == ({}, [], [])
