"""The recorder: every collective noted with its place, and what a rank that is killed was in is there to be read."""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.flight import BYTES, SITES, Flight, Launch
from phalanx.parallel.communication.arrivals import Arrivals
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.memory import Buffers
from phalanx.parallel.communication.recorder import FlightRecorder
from phalanx.parallel.communication.traffic import Traffic
from tests.forking import fork
from tests.parallel.communication.test_arrivals import Event
from tests.ranks import Ranks


def every_collective() -> list[Launch]:
    memory, rank = bytearray(BYTES), dist.get_rank()
    traffic = Traffic(recorder=FlightRecorder(memoryview(memory), rank, 2, 1))
    group = Communicator(dist.group.WORLD, traffic)
    traffic.begins(6)
    traffic.doing("backward")
    row = torch.ones(4)
    group.all_reduce(row).wait()
    group.all_reduce_exactly(torch.ones(300_000), Buffers(torch.device("cpu"))).wait()
    group.all_reduce_max(row)
    group.all_gather(torch.empty(2, 4), row).wait()
    group.reduce_scatter(row.clone(), torch.ones(2, 4)).wait()
    group.all_to_all(torch.ones(2, 3))
    group.all_to_all_rows(torch.ones(2, 3), [1, 1], [1, 1])
    group.broadcast(row, 0)
    (group.send if rank == 0 else group.receive)(row, 1 - rank).wait()
    group.broadcast_words(["a"])
    group.all_gather_words(["b"])
    with traffic.recorder.during("checkpoint"):
        group.all_reduce(torch.ones(())).wait()
    record = Flight.of(bytes(memory))
    assert record.phase == "backward"
    assert record.inside() is None
    return [record.launch(each) for each in record.collectives]


def test_every_collective_is_recorded(ranks: Ranks) -> None:
    for number, found in enumerate(ranks(2, every_collective)):
        kinds = [
            *["all-reduce"] * 3, "all-gather", "reduce-scatter", *["all-to-all"] * 2, "broadcast",
            ("send", "receive")[number], *["words"] * 2, "all-reduce",
        ]  # fmt: skip
        assert [each.kind for each in found] == kinds
        assert [each.sequence for each in found] == list(range(1, 13))
        assert {each.axis for each in found} == {"world"}
        assert all(each.step == 6 and each.left >= each.waiting >= each.entered > 0 for each in found)
        assert found[0].shape == (4,)
        assert found[-1].shape == ()
        assert [each.phase for each in found[-2:]] == ["backward", "checkpoint"]
        here = Path(__file__).read_text().splitlines()
        for each in found:
            file, _, line = each.place.rpartition(":")
            assert file.endswith("test_recorder.py")
            assert "group." in here[int(line) - 1]


def test_there_is_no_end_of_places() -> None:
    memory = bytearray(BYTES)
    recorder = FlightRecorder(memoryview(memory), 0, 1, 1)
    body = "\n".join(["def many(f):", *["    f()"] * (SITES + 50)])
    inside: dict[str, object] = {}
    exec(compile(body, __file__, "exec"), inside)
    for name in range(60):  # and groups
        recorder.launched(f"group {name}", "dp", 2, "all-reduce", torch.ones(1 << 3, 2, 2, 2, 2))
    deep = lambda: (lambda: recorder.launched("group 0", "dp", 2, "all-reduce", torch.ones(1)))()  # noqa: E731
    inside["many"](lambda: deep())  # type: ignore[operator]
    record = Flight.of(bytes(memory))
    assert len(record.collectives) == 60 + SITES + 50
    assert record.launch(record.collectives[0]).shape == (8, 2, 2, 4)


def _waits_and_dies(memory: int) -> None:
    recorder = FlightRecorder(memoryview(mmap.mmap(memory, BYTES)), 0, 2, 1)
    recorder.doing("reduce")
    recorder.waiting(recorder.launched("g", "dp", 2, "all-reduce", torch.ones(3)))
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_rank_was_in_is_there() -> None:
    memory = os.memfd_create("flight")
    os.ftruncate(memory, BYTES)
    process = fork(_waits_and_dies, descriptors=(memory,))
    process.join(timeout=30)
    assert process.exitcode == -signal.SIGKILL
    process.close()
    inside = Flight.of(os.pread(memory, BYTES, 0)).inside()
    os.close(memory)
    assert inside is not None
    assert (inside.name, inside.phase) == ("all-reduce 1 on dp", "reduce")


def test_a_gpu_is_where_it_has_come_to() -> None:
    memory, events = bytearray(BYTES), []
    recorder = FlightRecorder(memoryview(memory), 0, 2, 1)
    arrivals = Arrivals(
        memoryview(bytearray(24)).cast("q"), recorder.arrived, lambda: events.append(Event()) or events[-1]
    )
    arrivals._thread = threading.current_thread()  # looked at here instead
    for _ in range(3):
        arrivals.launching(recorder.launched("g", "dp", 2, "all-reduce", torch.ones(1), awaited=True))
    events[0].passed = events[1].passed = True
    arrivals.look()
    record = Flight.of(bytes(memory))
    assert (record.groups["g"].launched, record.groups["g"].arrived) == (3, 2)
    inside = record.inside()
    assert inside is not None
    assert inside.sequence == 2


def test_it_costs_microseconds() -> None:
    recorder = FlightRecorder(memoryview(bytearray(BYTES)), 0, 2, 1)
    tensor, best = torch.ones(8, 16), 1.0
    for _ in range(20):
        began = time.process_time()
        for _ in range(500):
            number = recorder.launched("g", "dp", 2, "all-reduce", tensor)
            recorder.waiting(number)
            recorder.left(number)
        best = min(best, (time.process_time() - began) / 500)
    assert best < 50e-6  # 3 to 10 are usual; a busy machine is no reason to fail
