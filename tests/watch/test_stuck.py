"""Why ranks stand still, in records of ranks; tests/watch/test_why.py has real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.events import EventLog
from phalanx.run import Run
from phalanx.watch.stuck import desynchronised, stuck
from tests.watch.records import Scribe, evidence


@pytest.fixture(autouse=True)
def some_steps(tmp_path: Path) -> None:
    """That take no time."""
    with EventLog(Run(tmp_path), 0) as log:
        for step in range(6):
            log.write("step", step=step)


def waiting(rank: int, scribe: Scribe) -> None:
    scribe.doing("backward", 1, step=3)
    scribe.collective("fsdp a", waits=None)


def test_before_steps_are_known_ranks_have_time(tmp_path: Path) -> None:
    Run(tmp_path).events_path(0).unlink()
    assert stuck(evidence(tmp_path, 2, waiting)) is None


def test_a_rank_that_nobody_waits_for_is_slow(tmp_path: Path) -> None:
    assert stuck(evidence(tmp_path, 1, lambda rank, scribe: scribe.doing("forward", 1))) is None


def test_where_all_have_come_the_network_is_looked_at(tmp_path: Path) -> None:
    found = stuck(evidence(tmp_path, 2, waiting))
    assert found is not None
    assert (found.kind, found.axis, found.step) == ("network", "fsdp", 4)
    assert "ranks 0, 1 wait in all-reduce 1 on fsdp, and all of its ranks have come there" in found.summary
    assert "network" in found.next


def test_ranks_that_left_no_record_are_counted(tmp_path: Path) -> None:
    def write(rank: int, scribe: Scribe) -> None:
        scribe.doing("backward", 1)
        scribe.collective("fsdp a", waits=None, ranks=4)

    found = stuck(evidence(tmp_path, 2, write))
    assert found is not None
    assert "2 of its ranks have left no record" in found.summary


def test_one_that_never_came_is_named_without_its_stack(tmp_path: Path) -> None:
    def write(rank: int, scribe: Scribe) -> None:
        scribe.collective("fsdp a")
        scribe.doing("data", 1, step=3)
        if rank == 0:
            scribe.collective("fsdp a", waits=None)

    found = stuck(evidence(tmp_path, 2, write))
    assert found is not None
    assert (found.kind, found.rank, found.axis, found.step) == ("stuck", 1, "fsdp", 4)
    assert (
        "never came to all-reduce 2 on fsdp, where rank 0 waits for it; it has been in data for 11 s" in found.summary
    )
    assert "--stacks" in found.next


@pytest.mark.parametrize(("phase", "known"), [("backward", True), ("evaluation", False)])
def test_what_may_take_long_is_given_time(tmp_path: Path, phase: str, known: bool) -> None:
    def write(rank: int, scribe: Scribe) -> None:
        scribe.doing(phase, 1)
        scribe.collective("fsdp a", waits=None)

    assert (stuck(evidence(tmp_path, 2, write)) is not None) == known
    assert stuck(evidence(tmp_path, 2, write, live="")) is None


def test_two_ranks_cannot_tell_who_is_right(tmp_path: Path) -> None:
    def write(rank: int, scribe: Scribe) -> None:
        scribe.collective("fsdp a", kind=("all-reduce", "all-gather")[rank])

    found = desynchronised(evidence(tmp_path, 2, write))
    assert found is not None
    assert (found.kind, found.rank, found.axis) == ("desynchronised", None, "fsdp")
    assert "which of them is right is not known" in "\n".join(found.evidence)
    assert desynchronised(evidence(tmp_path, 2, waiting)) is None
