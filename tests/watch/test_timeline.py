"""A rank's last steps, by phase."""

from __future__ import annotations

import pytest

from phalanx.flight import RECORDS, STEPS
from phalanx.watch.timeline import lateness, timeline
from tests.watch.records import Scribe, flights


def steps(
    scribe: Scribe, forward: float = 0.1, wait: float = 0.05, count: int = 8, collectives: int = 1, on_gpu: bool = False
) -> None:
    for step in range(count):
        scribe.doing("data", 0.02, step)
        scribe.doing("forward", forward)
        scribe.doing("reduce", 0.01)
        for _ in range(collectives):
            scribe.collective("dp a", wait / collectives, on_gpu=on_gpu)
        scribe.doing("update", 0.02)


def test_phases_are_told_apart_from_waits() -> None:
    scribe = Scribe(0)
    steps(scribe)
    line = timeline(scribe.flight())
    assert line is not None
    assert line.steps == [2, 3, 4, 5, 6]  # not the first ones, nor the last, which may go on
    assert line.seconds == pytest.approx(0.2)
    assert line.usual("data") == pytest.approx(0.02)
    assert line.usual("forward") == pytest.approx(0.1)
    assert (line.usual("reduce"), line.usual_wait) == (pytest.approx(0.01), pytest.approx(0.05))
    assert line.usual_busy == pytest.approx(0.15)
    assert line.share("update") == (pytest.approx(0.1), pytest.approx(0.1))


def test_of_a_gpus_rank_only_what_its_host_does_itself_counts() -> None:
    scribe = Scribe(0)
    steps(scribe, on_gpu=True)
    line = timeline(scribe.flight())
    assert line is not None
    assert line.on_gpu
    assert (line.usual_busy, line.usual_wait) == (pytest.approx(0.02), 0)


def test_more_collectives_than_there_are_records_leave_as_many_steps() -> None:
    scribe = Scribe(0)
    steps(scribe, collectives=RECORDS // 4)
    line = timeline(scribe.flight())
    assert line is not None
    assert line.steps == [2, 3, 4, 5, 6]
    assert (line.usual("forward"), line.usual_wait) == (pytest.approx(0.1), pytest.approx(0.05))


def test_of_many_steps_the_last_are_kept() -> None:
    scribe = Scribe(0)
    steps(scribe, count=STEPS + 10)
    line = timeline(scribe.flight())
    assert line is not None
    assert line.steps == list(range(10, STEPS + 9))


def test_a_rank_that_did_no_step_has_none() -> None:
    assert timeline(Scribe(0).flight()) is None
    scribe = Scribe(0)
    steps(scribe, count=2)
    assert timeline(scribe.flight()) is None


def test_who_comes_late_is_the_last() -> None:
    def write(rank: int, scribe: Scribe) -> None:
        steps(scribe, *((0.14, 0.01) if rank == 1 else (0.1, 0.05)))

    found = flights(3, write)
    late = lateness(found, [0, 1, 2], [3, 4])
    assert late[1] == (pytest.approx(0.04), 1.0)
    assert late[0][0] == pytest.approx(0)
    found[2].host = "another"
    assert not lateness(found, [0, 1, 2], [3, 4])
