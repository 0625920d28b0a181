"""What makes a run slow, in records of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.flight import COMPILED, COMPILING, DEVICE_WAITED, HAD, ON_DEVICE, ON_GPU, QUEUED
from phalanx.watch.slowness import crowded, slow, timelines
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


@pytest.mark.parametrize("phase", ["forward", "computing on its GPU"])
def test_a_rank_whose_gpu_is_late_is_named(tmp_path: Path, phase: str) -> None:
    """Hosts launch ahead, and stand in their update until their GPUs are there: only these know who waits."""

    def write(rank: int, scribe: Scribe) -> None:
        scribe.collective("fsdp a", on_gpu=True)
        slept = 0.5 if rank == 2 and phase == "forward" else 0.0
        steps(scribe, wait=0.0, forward=0.01 + slept, backward=0.01, update=0.6 - slept)

    found = evidence(tmp_path, 4, write)
    for rank, flight in found.flights.items():
        assert (flight.records["flags"] & ON_GPU).any()
        flight.steps[:, [ON_DEVICE, DEVICE_WAITED]] = 620_000_000, 20_000_000 if rank == 2 else 520_000_000
    said = slow(found)
    assert said is not None
    assert (said.kind, said.rank) == ("slow", 2)
    assert (
        said.summary
        == f"slow: rank 2 on {found.host(2)} holds the others up, by 500 ms in a step of 630 ms, in {phase}"
    )


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


def test_a_link_between_hosts_that_is_slow_is_named(tmp_path: Path) -> None:
    """Along dp, whose ranks are on two hosts; whoever computes for longer waits less."""

    def write(rank: int, scribe: Scribe) -> None:
        for step in range(10):
            scribe.doing("forward", 0.1, step)
            scribe.collective(f"tp {rank // 2}", 0.01)
            scribe.doing("backward", 0.2 + 0.04 * rank)
            scribe.collective(f"dp {rank % 2}", 0.8 - 0.04 * rank)

    found = evidence(tmp_path, 4, write)
    for rank, flight in found.flights.items():
        flight.host = f"node{1 + rank // 2}"
    found.noted = [{"kind": "step", "time": 1.0 * step, "sent": {"dp": 1 << 20}} for step in range(10)]
    said = slow(found)
    assert said is not None
    assert (said.kind, said.rank, said.axis) == ("slow", None, "dp")
    assert "along dp is not hidden" in said.summary
    assert said.summary.endswith("between node1, node2")
    assert any("a second" in line for line in said.evidence)


def test_ranks_without_processors_say_nothing_of_messages(tmp_path: Path) -> None:
    found = evidence(tmp_path, 2, lambda rank, scribe: steps(scribe, wait=0.6))
    for flight in found.flights.values():
        flight.steps[:, [HAD, QUEUED]] = 100_000_000, 300_000_000
    assert slow(found) is None
    assert crowded(timelines(found))[0].startswith("ranks were ready for 300 ms of a step without a processor")


@pytest.mark.parametrize("who", [[1], [0, 1, 2]])
def test_functions_that_are_compiled_anew(tmp_path: Path, who: list[int]) -> None:
    found = evidence(tmp_path, 3, lambda rank, scribe: steps(scribe, backward=0.4 if rank in who else 0.1))
    for rank in who:
        flight = found.flights[rank]
        flight.steps[:, [COMPILED, COMPILING]] = 1, 200_000_000
    said = slow(found)
    assert said is not None
    assert said.rank == (1 if who == [1] else None)
    assert "compiled anew in 7 of the last 7 steps, for 200 ms in each of them" in said.summary


def test_steps_that_stand_still_for_checkpoints(tmp_path: Path) -> None:
    pause = {"kind": "pause", "on": "checkpoint", "seconds": 3.0, "step": 4, "last": False, "where": "s3://here"}
    found = evidence(tmp_path, 2, lambda rank, scribe: None)
    found.noted = [{"kind": "start", "time": 0.0}, {**pause, "time": 5.0}, {**pause, "time": 9.0, "seconds": 4.0}]
    said = slow(found)
    assert said is not None
    assert said.summary == (
        "slow: steps stood still for checkpoints, 7 s of 9 s: 2 times, the longest after step 4 for 4 s"
    )
    assert said.evidence == ["they are kept in s3://here"]
    found.noted = [{"kind": "start", "time": 0.0}, {**pause, "time": 50.0}]
    assert slow(found) is None
