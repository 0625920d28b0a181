"""The flight record: what a rank wrote is read back, also when more came than there is room for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phalanx import flight
from phalanx.parallel.communication.recorder import FlightRecorder
from phalanx.run import Run


def written(rank: int = 0, collectives: int = 3) -> bytearray:
    memory = bytearray(flight.BYTES)
    recorder = FlightRecorder(memoryview(memory), rank, 2, 1)
    recorder.step = 4
    recorder.doing("forward")
    for _ in range(collectives):
        number = recorder.launched("mesh 1, 3 of 0", "fsdp", 2, "all-reduce", torch.ones(3, 5, dtype=torch.bfloat16))
        recorder.waiting(number)
        recorder.left(number)
    recorder.waiting(recorder.launched("mesh 1, 3 of 0", "fsdp", 2, "all-gather", torch.ones(7)))
    return memory


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in range(2):
        flight.save(run, 1, rank, written(rank))
    (flight.folder(run, 1) / "rank-00002").write_bytes(b"cut")
    assert list(flight.generations(run)) == [1]
    first, second = flight.read(run, 1).values()
    assert (first.rank, second.rank, first.world, first.generation, first.phase) == (0, 1, 2, 1, "forward")
    assert first.saved > first.since > 0
    (row,) = first.groups.values()
    assert (row.axis, row.size, row.launched, row.arrived) == ("fsdp", 2, 4, 4)
    one = first.launch(first.collectives[0])
    assert (one.name, one.content, one.step) == ("all-reduce 1 on fsdp", "bfloat16 [3, 5]", 4)
    assert one.left >= one.waiting >= one.entered > 0
    inside = first.inside()
    assert inside is not None
    assert (inside.name, inside.content, inside.left) == ("all-gather 4 on fsdp", "float32 [7]", 0)
    assert len(first.along("mesh 1, 3 of 0")) == 4
    assert not len(first.along("another"))


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    record = flight.Flight.of(bytes(written(collectives=3 * flight.RECORDS)))
    assert len(record.records) == flight.RECORDS - flight.OVERWRITTEN
    sequences = record.collectives["sequence"].tolist()
    assert sequences == list(range(sequences[0], 3 * flight.RECORDS + 2))
    assert next(iter(record.groups.values())).launched == 3 * flight.RECORDS + 1


def test_something_else_is_no_record() -> None:
    with pytest.raises(ValueError, match="no flight record"):
        flight.Flight.of(b"something")
