"""Traffic: what was sent, told to who watches, and seen by a supervisor while a rank waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.traffic import Traffic
from tests.ranks import Ranks


def seen_while_waiting() -> tuple[list[int], list[int]]:
    """Rank 1 comes late; meanwhile another thread of rank 0 looks at what a supervisor would see."""
    traffic = Traffic()
    seen: list[list[int]] = []
    looking = threading.Timer(0.3, lambda: seen.append(list(traffic.signs)))
    looking.start()
    if dist.get_rank() == 1:
        time.sleep(0.6)
    Communicator(dist.group.WORLD, traffic).all_reduce(torch.ones(1)).wait()
    looking.join()
    return seen[0], list(traffic.signs)


def test_a_rank_that_waits_says_so(ranks: Ranks) -> None:
    first, second = ranks(2, seen_while_waiting)
    assert first == ([1, 0, 1], [1, 0, 0])
    assert second == ([0, 0, 0], [1, 0, 0])


def test_every_watcher_is_told_and_bytes_are_counted_by_axis_and_kind() -> None:
    traffic, told = Traffic(), []
    traffic.watchers += [lambda axis, kind, tensor: told.append((axis, kind, len(tensor)))] * 2
    traffic.launched("a", "dp", 2, "all-reduce", torch.ones(8), 0.5)
    traffic.recorded("b", "pp", 2, "receive", torch.ones(3))
    assert told == [("dp", "all-reduce", 8)] * 2 + [("pp", "receive", 3)] * 2
    assert traffic.sent == {("dp", "all-reduce"): 16}
    assert traffic.calls == {("dp", "all-reduce"): 1}


def watched_waits() -> list[str]:
    """What is told while this rank waits, and when."""
    told: list[str] = []

    @contextmanager
    def watcher(axis: str, kind: str) -> Iterator[None]:
        told.append(f"{axis} {kind}")
        yield
        told.append("over")

    traffic = Traffic()
    traffic.wait_watchers.append(watcher)
    world = Communicator(dist.group.WORLD, traffic)
    world.all_reduce(torch.ones(1)).wait()
    pending = world.all_gather(torch.ones(2, 3), torch.ones(3))
    told.append("launched")
    pending.wait()
    world.broadcast_words(["a"])
    return [word.replace(world.name, "world") for word in told]


def test_who_watches_waits_is_told_of_axis_and_kind(ranks: Ranks) -> None:
    for told in ranks(2, watched_waits):
        assert told == [
            "world all-reduce", "over", "launched", "world all-gather", "over", "world words", "over",
        ]  # fmt: skip


def test_a_supervisor_sees_it_in_memory_that_it_lends() -> None:
    lent = memoryview(bytearray(24)).cast("q")
    Traffic(lent).launched("a", "dp", 2, "all-reduce", torch.ones(1), 1)
    assert lent.tolist() == [1, 0, 0]


def test_a_rank_that_is_alone_can_show_that_it_lives() -> None:
    traffic = Traffic()
    traffic.alive()
    traffic.alive()
    assert list(traffic.signs) == [2, 0, 0]
    assert not traffic.calls
