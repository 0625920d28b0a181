"""Collectives that user code calls through torch itself are in the flight record."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from phalanx import Engine, flight
from phalanx.flight import OUTSIDE, Flight
from phalanx.parallel.communication.outside import record_outside
from phalanx.parallel.communication.recorder import FlightRecorder
from tests.ranks import Ranks
from tests.tasks import Digits


def called(layout: str) -> Any:
    memory = bytearray(flight.BYTES)
    with Engine(Digits(steps=1), layout) as engine:
        undo = record_outside(FlightRecorder(memoryview(memory), engine.rank, engine.world, 1))
        plain = dist.all_reduce
        total = torch.ones(3)
        dist.all_reduce(total)
        every = [torch.empty(2) for _ in range(2)]
        dist.all_gather(every, torch.ones(2, dtype=torch.float32))
        dist.barrier()
        dist.all_reduce(torch.ones(4), group=dist.group.WORLD, async_op=True).wait()
        apart = dist.new_group([0])
        dist.all_reduce(torch.ones(6), group=apart)  # of which the other rank is none
        if engine.rank == 0:
            dist.destroy_process_group(apart)
        engine.mesh.world.all_reduce(torch.ones(5)).wait()  # ours is not
        undo()
        assert dist.all_reduce is not plain
        dist.all_reduce(total)
    record = Flight.of(bytes(memory))
    row, *_ = record.groups.values()
    launches = [found for each in record.collectives if (found := record.launch(each)).shape != (6,)]
    told = [(each.kind, each.shape, each.left > 0) for each in launches]
    return row.axis, row.size, row.arrived, told, launches[0].user.rpartition("/")[2].partition(":")[0], total.tolist()


def test_they_are_recorded_with_the_users_line(ranks: Ranks) -> None:
    expected = [
        ("all-reduce", (3,), True), ("all-gather", (2,), True), ("barrier", (0,), True), ("all-reduce", (4,), False),
    ]  # fmt: skip
    for axis, size, arrived, told, file, total in ranks(2, called, "dp=2"):
        assert (axis, size, arrived) == (OUTSIDE, 2, 4)
        assert told == expected
        assert file == "test_outside.py"
        assert total == [4.0, 4.0, 4.0]
