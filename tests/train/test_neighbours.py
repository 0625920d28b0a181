"""Copies at the neighbour: who keeps whose, that they are whole, and that a lost host's state is found there."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from phalanx import Engine, Layout
from phalanx.checkpoint.manager import CheckpointManager
from phalanx.checkpoint.slot import Slot
from phalanx.checkpoint.store import open_store
from phalanx.train import checkpointing
from phalanx.train.checkpointing import Checkpointer
from phalanx.train.neighbours import Neighbours, guests_of, has_all_on_every_host, holder_of, pairs
from phalanx.train.policy import Policy
from phalanx.train.restoring import Restorer
from tests.ranks import Ranks
from tests.tasks import Digits


def test_each_copy_has_one_holder_on_the_next_host() -> None:
    for hosts in ([0, 0, 1, 1, 2, 2], [0, 1, 1, 2], [0, 0, 0, 1], [0, 1]):
        for rank, host in enumerate(hosts):
            holder = holder_of(hosts, rank)
            assert hosts[holder] == (host + 1) % (max(hosts) + 1)
            assert rank in guests_of(hosts, holder)


def test_who_keeps_whose_is_found_in_no_time_among_ten_thousand() -> None:
    hosts = [rank // 8 for rank in range(10_240)]
    started = time.process_time()
    assert holder_of(hosts, 10_239) == 7
    assert guests_of(hosts, 7) == [10_239]
    assert [pair for pair in pairs(hosts) if 7 in pair] == [(7, 15), (10_239, 7)]
    assert time.process_time() - started < 1  # it took 50 minutes


@pytest.mark.parametrize("sizes", [[1, 1], [2, 2], [1, 2, 1], [3, 1, 2], [1] * 4, [2] * 5, [1] * 9])
def test_links_are_made_in_a_few_turns(sizes: list[int]) -> None:
    hosts = [host for host, ranks in enumerate(sizes) for _ in range(ranks)]
    assert sorted(pairs(hosts)) == [(rank, holder_of(hosts, rank)) for rank in range(len(hosts))]
    left = [[pair for pair in pairs(hosts) if rank in pair] for rank in range(len(hosts))]
    turns = 0
    while any(left):
        ready = {own[0] for own in left if own and all(left[other][0] == own[0] for other in own[0])}
        assert ready, "all wait for each other"
        left = [own[1:] if own and own[0] in ready else own for own in left]
        turns += 1
    assert turns <= 3 * max(sizes)


@pytest.mark.parametrize(
    ("layout", "hosts", "want"),
    [
        ("dp=2", [0, 1], True),
        ("dp=4", [0, 0, 1, 2], True),
        ("dp=2,fsdp=2", [0, 0, 1, 1], True),
        ("dp=2,fsdp=2", [0, 1, 0, 1], False),
        ("dp=2,fsdp=2", [0, 1, 2, 3], False),
        ("fsdp=2", [0, 1], False),
        ("dp=2,tp=2", [0, 0, 1, 1], True),
        ("dp=2,pp=2", [0, 0, 1, 1], False),  # a stage a host
        ("dp=2,pp=2", [0, 1, 0, 1], True),
    ],
)
def test_hosts_that_have_all_need_no_copies(layout: str, hosts: list[int], want: bool) -> None:
    assert has_all_on_every_host(Layout.parse(layout), hosts) is want


def exchanged(layout: str, hosts: str, folder: str) -> list[tuple[int, int]]:
    """Copies at the neighbour that are not what their owner has, over some steps."""
    os.environ["PHALANX_HOSTS"] = hosts
    guests = [[Slot(), Slot()] for _ in range(2)]
    wrong = []
    try:
        with mock.patch.object(checkpointing, "REST_OF_LINKS", 0), Engine(Digits(), layout) as engine:
            checkpointer = Checkpointer(
                engine, CheckpointManager(open_store(folder)), Policy(minutes=0, memory_steps=1), guests=guests
            )
            assert checkpointer.neighbours is not None
            assert all(group.size == 2 for group in checkpointer.neighbours._groups.values())
            for batch in engine.batches():
                checkpointer.before_step()
                checkpointer.after_step(engine.step(batch).signals, last=False)
                checkpointer.drain()
                every: list[Any] = [None] * dist.get_world_size()
                own = {slot.step(): slot.content().clone() for slot in checkpointer.slots if slot.step() is not None}
                dist.all_gather_object(every, own)
                for origin, slots in zip(checkpointer.neighbours.origins, guests, strict=False):
                    for slot in slots:
                        if slot.step() is not None and not torch.equal(slot.content(), every[origin][slot.step()]):
                            wrong.append((origin, engine.step_number))
            checkpointer.close()
        return wrong
    finally:
        os.environ.pop("PHALANX_HOSTS")
        for slots in guests:
            for slot in slots:
                slot.close()


@pytest.mark.parametrize(
    ("layout", "hosts"), [("fsdp=2", "1,1"), ("fsdp=4", "2,2"), ("dp=2,fsdp=2", "1,2,1"), ("fsdp=4", "1,1,1,1")]
)
def test_copies_arrive_whole(ranks: Ranks, tmp_path: Path, layout: str, hosts: str) -> None:
    world = sum(map(int, hosts.split(",")))
    assert ranks(world, exchanged, layout, hosts, str(tmp_path)) == [[]] * world


def lost_and_found(folder: str) -> tuple[str | None, int, bool]:
    """Four hosts of one rank; then three, without the second, each with what its memory holds."""
    rank = int(os.environ["RANK"])
    own, guests = [Slot(), Slot()], [[Slot(), Slot()]]
    manager = CheckpointManager(open_store(folder))
    try:
        os.environ["PHALANX_HOSTS"] = "1,1,1,1"
        with mock.patch.object(checkpointing, "REST_OF_LINKS", 0), Engine(Digits(), "fsdp=4") as engine:
            checkpointer = Checkpointer(
                engine, manager, Policy(minutes=0, memory_steps=2), generation=1, slots=own, guests=guests
            )
            for batch in engine.batches():
                checkpointer.before_step()
                checkpointer.after_step(engine.step(batch).signals, last=False)
                checkpointer.drain()
            checkpointer.close()
            weights = engine.whole_weights()
        held = [] if rank == 1 else [*own, *guests[0]]  # the second host has come back, with nothing
        with Engine(Digits(), "dp=2,fsdp=2") as engine:
            checkpointer = Checkpointer(
                engine, manager, Policy(minutes=0), generation=2, slots=[Slot(), Slot()], guests=[[Slot()]]
            )
            source = Restorer(engine, manager, held, generation=2).restore()
            checkpointer.close()
            again = engine.whole_weights()
            same = all(torch.equal(again[name], weight) for name, weight in weights.items())
            return source, engine.step_number, same
    finally:
        os.environ.pop("PHALANX_HOSTS")
        for slot in (*own, *guests[0]):
            slot.close()


def test_a_lost_hosts_state_is_found_at_its_neighbour(ranks: Ranks, tmp_path: Path) -> None:
    for source, step, same in ranks(4, lost_and_found, str(tmp_path)):
        assert step == 6
        assert same
        assert source is not None
        assert source.endswith("step-00000006")


def rests(folder: str) -> tuple[list[int], bool]:
    """The steps of which this rank has copies, where each that goes to another host takes half a second there."""
    os.environ["PHALANX_HOSTS"] = "1,1"
    exchange, steps = Neighbours.exchange, set[int]()

    def slow(self: Neighbours, slot: Slot) -> None:
        time.sleep(0.5)
        exchange(self, slot)

    try:
        with mock.patch.object(Neighbours, "exchange", slow), Engine(Digits(), "fsdp=2") as engine:
            policy, guests = Policy(minutes=0, memory_steps=1, steps=4), [[Slot(), Slot()]]
            checkpointer = Checkpointer(engine, CheckpointManager(open_store(folder)), policy, guests=guests)
            for batch in engine.batches():
                checkpointer.before_step()
                checkpointer.after_step(engine.step(batch).signals, last=False)
                checkpointer.drain()
                steps |= {step for slot in checkpointer.slots if (step := slot.step()) is not None}
            at_the_neighbour = {slot.step() for slot in guests[0]}
            checkpointer.close()
            return sorted(steps), at_the_neighbour == {1, None}
    finally:
        os.environ.pop("PHALANX_HOSTS")


def test_a_link_rests_after_a_copy_that_took_its_time(ranks: Ranks, tmp_path: Path) -> None:
    """What goes to a file does all the same, and not to the next host."""
    for steps, alone in ranks(2, rests, str(tmp_path)):
        assert steps == [1, 4]
        assert alone
