"""What makes a run slow, in records of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.watch.slowness import slow
from tests.watch.records import Scribe, evidence


def steps(scribe: Scribe, wait: float = 0.02, **seconds: float) -> None:
    usual = {"data": 0.01, "forward": 0.1, "backward": 0.2, "update": 0.02, "checkpoint": 0.0, "evaluation": 0.0}
    for step in range(10):
        scribe.recorder.step = step
        for phase, each in {**usual, **seconds}.items():
            scribe.doing(phase, each)
            if phase == "backward":
                scribe.collective("fsdp a", wait)


def test_steps_that_are_alike_are_not_slow(tmp_path: Path) -> None:
    assert slow(evidence(tmp_path, 2, lambda rank, scribe: steps(scribe, wait=0.03 - 0.01 * rank))) is None
    assert slow(evidence(tmp_path, 2, lambda rank, scribe: None)) is None


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "update"])
def test_a_rank_that_is_slow_is_named_with_its_phase(tmp_path: Path, phase: str) -> None:
    def write(rank: int, scribe: Scribe) -> None:
        steps(scribe, **({phase: 0.5} if rank == 2 else {"wait": 0.4}))

    found = slow(evidence(tmp_path, 4, write))
    assert found is not None
    assert (found.kind, found.rank) == ("slow", 2)
    assert found.summary.endswith(f"in {phase}")


def test_stages_of_a_pipeline_are_not_held_against_each_other(tmp_path: Path) -> None:
    def write(rank: int, scribe: Scribe) -> None:
        scribe.collective("pp lane")
        steps(scribe, backward=0.2 + rank)

    def own(rank: int, scribe: Scribe) -> None:
        scribe.collective(f"dp {rank}")
        write(rank, scribe)

    found = evidence(tmp_path, 2, own)
    for flight in found.flights.values():
        flight.groups = {name: row for name, row in flight.groups.items() if row.axis != "fsdp"}
    assert slow(found) is None


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ({"data": 0.5}, "steps wait for data, 500 ms of"),
        ({"wait": 0.6}, "communication along fsdp is not hidden, 600 ms of a step of 930 ms"),
        ({"checkpoint": 1.0}, "of the last steps' time went to checkpoint"),
        ({"evaluation": 1.0}, "of the last steps' time went to evaluation"),
    ],
)
def test_what_all_ranks_wait_for_is_named(tmp_path: Path, seconds: dict[str, float], words: str) -> None:
    found = slow(evidence(tmp_path, 2, lambda rank, scribe: steps(scribe, **seconds)))
    assert found is not None
    assert words in found.summary
    assert found.next
    assert found.exit_code == 1
