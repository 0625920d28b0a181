"""The ranks' store: torch's words for a store, spoken over connections that only ranks with the key can make."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.launch.key import Key
from phalanx.launch.lines import Line, ready
from phalanx.launch.rank_store import RankStore, StoreServer, join, purpose, split
from tests.ranks import Ranks

KEY = Key(b"of these tests")


class Place:
    def __init__(self) -> None:
        sock = socket.create_server(("127.0.0.1", 0))
        self.port = sock.getsockname()[1]
        self.server = StoreServer(sock, KEY, 4)
        self.opened: list[RankStore] = []

    def store(self, seconds: float = 5.0, key: Key = KEY) -> RankStore:
        self.opened.append(RankStore("127.0.0.1", self.port, key, timedelta(seconds=seconds)))
        return self.opened[-1]


@pytest.fixture
def place() -> Iterator[Place]:
    one = Place()
    yield one
    one.server.close()
    for store in one.opened:
        store.close()


def test_what_a_store_of_torch_can_do(place: Place) -> None:
    """Also through torch's own side of it, as a prefix is."""
    one = place.store()
    every: list[Any] = [one, dist.PrefixStore("run", place.store())]
    for store in every:
        store.set("a", "1")
        assert store.get("a") == b"1"
        assert (store.add("n", 5), store.add("n", -2)) == (5, 3)
        store.append("a", "2")
        assert store.multi_get(["a", "n"]) == [b"12", b"3"]
        store.multi_set(["b", "c"], ["x", "y"])
        assert store.check(["a", "b", "c"])
        assert not store.check(["a", "d"])
        assert store.compare_set("b", "x", "z") == b"z"
        assert store.compare_set("b", "x", "w") == b"z"
        assert store.compare_set("new", "", "v") == b"v"
        assert store.delete_key("b")
        assert not store.delete_key("b")
        store.wait(["a"])
        store.wait(["a"], timedelta(seconds=1))
        assert store.has_extended_api()
    assert one.num_keys() == 8
    one.set("bytes", bytes(range(256)))
    assert one.get("bytes") == bytes(range(256))


def test_who_asks_for_what_is_not_there_waits_for_it(place: Place) -> None:
    found: list[list[bytes]] = []
    waiting = threading.Thread(target=lambda: found.append(place.store().multi_get(["a", "b"])))
    waiting.start()
    other = place.store()
    other.set("b", "2")
    time.sleep(0.1)
    assert not found
    other.set("a", "1")
    waiting.join()
    assert found == [[b"1", b"2"]]


def test_waiting_ends_in_time_and_the_store_can_still_be_used(place: Place) -> None:
    store = place.store()
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"Timed out waiting for keys of the ranks' store for 0\.2 s: missing"):
        store.wait(["missing"], timedelta(seconds=0.2))
    assert time.monotonic() - started < 2.0
    store.set("missing", "late")
    assert store.get("missing") == b"late"


def test_a_store_that_is_gone_is_noticed(place: Place) -> None:
    store = place.store()
    place.server.close()
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        store.get("a")


def test_who_does_not_know_the_key_cannot_reach_it(place: Place) -> None:
    with pytest.raises(RuntimeError, match="did not take this rank's key"):
        place.store(key=Key(b"another"))
    with pytest.raises(RuntimeError):  # torch's own client, which has none
        dist.TCPStore("127.0.0.1", place.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2))
    place.store().set("a", "1")


@pytest.mark.parametrize(
    "payload",
    [b"", b"\x00\x00", b"\xff" * 8, join([b"run"]), join([b"set", b"a"]), join([b"add", b"a", b"b"]), join([b"get"]),
     join([b"get", b"x", b"a"]), join([b"count", b"a"]), join([b""] * 70_000)],
)  # fmt: skip
def test_what_no_rank_asks_ends_that_connection_and_nothing_else(place: Place, payload: bytes) -> None:
    line = Line(socket.create_connection(("127.0.0.1", place.port)), KEY, purpose(place.port))
    while not line.proven:
        assert ready([line], 5.0)
        line.receive()
    line.send(payload)
    while not line.broken:
        assert ready([line], 5.0)
        line.flush()
        line.receive()
    line.close()
    place.store().set("a", "1")


def test_parts_arrive_as_they_were() -> None:
    parts = [b"", b"a", bytes(1 << 16)]
    assert split(join(parts)) == parts


def speak(port: int) -> list[float]:
    """Groups, collectives and a barrier, over a store of ours alone."""
    world = dist.group.WORLD
    assert world is not None
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = RankStore("127.0.0.1", port, KEY, timedelta(seconds=20))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20))
    found = []
    for members in (range(size), range(0, size, 2), range(1, size, 2)):
        group = dist.new_group(list(members), timeout=timedelta(seconds=20))
        if rank in members:
            total = torch.tensor([float(rank)])
            dist.all_reduce(total, group=group)
            found.append(float(total))
    dist.barrier()
    dist.monitored_barrier()
    dist.destroy_process_group()
    store.close()
    return found


def test_ranks_make_groups_over_it(ranks: Ranks, place: Place) -> None:
    assert ranks(4, speak, place.port) == [[6.0, 2.0], [6.0, 4.0]] * 2
