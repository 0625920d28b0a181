"""Who talks to whom, from flight records: bytes as events count them, between the ranks of a group alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from phalanx import flight
from phalanx.parallel.communication.recorder import FlightRecorder
from phalanx.run import Run
from phalanx.watch.page import links


def fly(run: Run, rank: int, world: int, host: str, waits: bool = True) -> FlightRecorder:
    """A rank of fsdp=2 x pp: three steps, in each a gather along fsdp, and what goes to the next stage."""
    memory = bytearray(flight.BYTES)
    recorder = FlightRecorder(memoryview(memory), rank, world, 1)
    stages = [each for each in range(world) if each % 2 == rank % 2]
    for step in range(4):
        recorder.step = step
        recorder.doing("forward")
        record = recorder.launched(f"fsdp of {rank // 2}", "fsdp", 2, "all-gather", torch.zeros(256))
        if waits:
            recorder.waiting(record)
            recorder.left(record)
        if rank != stages[-1]:
            recorder.launched(f"pp of {rank % 2}", "pp", len(stages), "send", torch.zeros(10, 10))
        else:
            recorder.launched(f"pp of {rank % 2}", "pp", len(stages), "receive", torch.zeros(10, 10))
        recorder.doing("checkpoint")
        recorder.launched(f"fsdp of {rank // 2}", "fsdp", 2, "all-gather", torch.zeros(999))
    at = flight.HEADER.unpack_from(memory)
    flight.HEADER.pack_into(memory, 0, *at[:6], host.encode(), at[7])
    flight.save(run, 1, rank, memory)
    return recorder


def test_bytes_go_where_groups_are(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for rank in range(6):
        fly(run, rank, 6, f"node{rank // 2}")
    found = links.read(run)
    assert (found["ranks"], found["first"], found["last"]) == (6, 1, 3), "whole steps alone"
    assert found["hosts"] == links.hosts(run) == ["node0", "node0", "node1", "node1", "node2", "node2"]
    fsdp, pp = np.array(found["axes"]["fsdp"]["sent"]), np.array(found["axes"]["pp"]["sent"])
    assert {(a, b): fsdp[a, b] for a, b in np.argwhere(fsdp).tolist()} == {
        (0, 1): 1024, (1, 0): 1024, (2, 3): 1024, (3, 2): 1024, (4, 5): 1024, (5, 4): 1024,
    }, "and not what is sent between two steps"  # fmt: skip
    assert {(a, b): pp[a, b] for a, b in np.argwhere(pp).tolist()} == {
        (0, 2): 400,
        (1, 3): 400,
        (2, 4): 400,
        (3, 5): 400,
    }
    assert (found["axes"]["fsdp"]["groups"], found["axes"]["fsdp"]["size"], found["axes"]["fsdp"]["calls"]) == (3, 2, 1)
    assert all(0 <= wait < 0.1 for wait in found["axes"]["fsdp"]["waits"])
    assert found["axes"]["pp"]["pairs"] == [[0, 2, 400], [1, 3, 400], [2, 4, 400], [3, 5, 400]]


def test_many_ranks_share_rows(tmp_path: Path) -> None:
    use = links.AxisUse(np.ones((200, 200)), np.ones(200), np.full(200, np.nan), 1, 200)
    found = links.told({"dp": use}, dict.fromkeys(range(200), ""), np.array([1, 2]))
    axis = found["axes"]["dp"]
    assert found["ranks_a_row"] == 4
    assert (len(axis["sent"]), axis["sent"][0][0], axis["sent"][49][49]) == (50, 16, 16)
    assert len(axis["pairs"]) == links.MOST_PAIRS
    assert axis["waits"][0] is None, "what a GPU waits is not known"


def test_a_run_without_records(tmp_path: Path) -> None:
    assert links.read(Run(tmp_path))["axes"] == {}
    assert links.hosts(Run(tmp_path)) == []
    (tmp_path / "flight" / "generation-00001").mkdir(parents=True)
    (tmp_path / "flight" / "generation-00001" / "rank-00000").write_bytes(b"cut")
    assert links.read(Run(tmp_path))["axes"] == {}
    assert links.hosts(Run(tmp_path)) == []
