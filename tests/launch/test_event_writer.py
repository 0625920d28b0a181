"""The one on a host that writes its ranks' events."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest

from phalanx import Run, events
from phalanx.event_ring import RING_BYTES
from phalanx.events import EventLog
from phalanx.launch.event_writer import EventWriter


def log(writer: EventWriter, rank: int, shared: bool = True) -> EventLog:
    return EventLog(writer.run, 4 + rank, shared=shared, ring=writer.rings[rank])


def step(number: int) -> dict[str, object]:
    return {
        "step": number, "seconds": {"forward": 0.1234567891}, "sent": {}, "losses": {}, "logged": {}, "loss": 1.5,
        "skipped": False, "bad": "", "signals": [], "turn": "", "grad_norm": 1.0, "samples": "ab",
    }  # fmt: skip


def _killed(writer: EventWriter, rank: int, shared: bool) -> None:
    mine = log(writer, rank, shared)
    mine.write("start", step=0)
    for number in range(3):
        mine.step(step(number), {"tflops": 1 / 3}, {})
    os.kill(os.getpid(), signal.SIGKILL)


def test_events_of_ranks_that_were_killed_are_written_by_their_host(tmp_path: Path) -> None:
    writer = EventWriter(Run.create(tmp_path / "run", "x"), 2)
    writer.begin(4)
    for rank in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads: the child needs nothing of theirs
            pid = os.fork()
        if not pid:
            _killed(writer, rank, rank == 0)
        os.waitpid(pid, 0)
    writer.start()
    writer.end()
    first, second = (list(writer.run.events(rank)) for rank in (4, 5))
    assert [event["kind"] for event in first] == ["start", *["step"] * 3]
    assert (first[1]["tflops"], first[1]["seconds"], first[1]["loss"]) == (0.33333, {"forward": 0.123457}, 1.5)
    assert [event["step"] for event in second] == [0, 0, 1, 2]
    assert "loss" not in second[1]


def test_what_was_noted_is_settled_while_ranks_run_and_a_new_generation_goes_on(tmp_path: Path) -> None:
    writer = EventWriter(Run.create(tmp_path / "run", "x"), 1)
    for generation in (1, 2):
        writer.begin(4)
        mine = log(writer, 0)
        writer.start()
        mine.write("start", generation=generation)
        mine.settle()
        assert len(list(writer.run.events(4))) == generation
        writer.end()


def test_more_than_the_ring_holds_waits_in_memory(tmp_path: Path) -> None:
    writer = EventWriter(Run.create(tmp_path / "run", "x"), 1)
    writer.begin(4)
    mine = log(writer, 0)
    for number in range(30):
        mine.write("note", number=number, text="x" * (RING_BYTES // 10))
    threading.Timer(0.2, writer.start).start()
    mine.close()
    writer.end()
    assert [event["number"] for event in writer.run.events(4)] == list(range(30))


def test_a_folder_that_does_not_answer_holds_up_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, hung = EventWriter(Run.create(tmp_path / "run", "x"), 1), threading.Event()
    plain = os.write
    monkeypatch.setattr(events.os, "write", lambda *given: hung.wait(20) and plain(*given))
    monkeypatch.setattr("phalanx.launch.event_writer.LAST_SECONDS", 0.2)
    writer.begin(4)
    mine = log(writer, 0)
    writer.start()
    began = time.monotonic()
    mine.write("start", step=0)
    assert time.monotonic() - began < 1
    mine.settle(0.3)
    writer.end()
    writer.begin(4)  # the next generation has memory of its own
    hung.set()
    mine = log(writer, 0)
    mine.write("start", step=1)
    writer.start()
    writer.end()
    for _ in range(100):
        if len(found := list(writer.run.events(4))) == 2:
            break
        time.sleep(0.05)
    assert sorted(event["step"] for event in found) == [0, 1]


def test_what_one_rank_left_costs_the_others_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A folder in the place of its file; when it is gone, what waits is written."""
    writer = EventWriter(Run.create(tmp_path / "run", "x"), 2)
    writer.begin(4)
    writer.run.events_path(4).mkdir(parents=True)
    first, second = log(writer, 0), log(writer, 1)
    first.write("start", step=1)
    second.write("start", step=2)
    writer.start()
    assert second.settle()
    assert not first.settle(0.2)
    writer.run.events_path(4).rmdir()
    assert first.settle()
    writer.end()
    assert [[event["step"] for event in writer.run.events(rank)] for rank in (4, 5)] == [[1], [2]]
    assert capfd.readouterr().err.count("events of rank 4 cannot be written") == 1


def test_a_large_event_is_cut_off_and_says_so(tmp_path: Path) -> None:
    writer = EventWriter(Run.create(tmp_path / "run", "x"), 1)
    writer.begin(4)
    mine = log(writer, 0)
    mine.write("failure", reason="x" * RING_BYTES, places=list(range(RING_BYTES)), step=3)
    writer.start()
    mine.close()
    writer.end()
    (event,) = writer.run.events(4)
    assert event["step"] == 3
    assert event["reason"].endswith(f"(cut off: {RING_BYTES} letters)")
    assert event["places"][-1] == f"and {RING_BYTES - 60} more"
