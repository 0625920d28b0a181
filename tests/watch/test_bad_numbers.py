"""What is wrong with a run's numbers, from its events."""

from __future__ import annotations

import math
from pathlib import Path

from phalanx.events import EventLog
from phalanx.run import Run
from phalanx.watch.bad_numbers import Events, wrong


def run_with(path: Path, *events: tuple[str, dict[str, object]], losses: list[float] | None = None) -> Run:
    run = Run(path)
    with EventLog(run, 0) as log:
        for step, loss in enumerate(losses or []):
            log.write("step", step=step, loss=loss, samples="", grad_norm=1.0, lr=0.1, skipped=False)
        for kind, fields in events:
            log.write(kind, **fields)
    return run


def noted(path: Path, *events: tuple[str, dict[str, object]], losses: list[float] | None = None) -> Events:
    return list(run_with(path, *events, losses=losses).events(0))


def test_a_loss_that_falls_is_not_wrong(tmp_path: Path) -> None:
    losses = [3 * math.exp(-step / 20) + 0.3 * (step % 3) for step in range(200)]
    assert wrong(noted(tmp_path, losses=losses)) is None


def test_a_spike_is_named_with_its_step(tmp_path: Path) -> None:
    losses = [2.0 + 0.01 * (step % 5) for step in range(60)]
    losses[41] = 30.0
    found = wrong(noted(tmp_path, losses=losses))
    assert found is not None
    assert (found.kind, found.step) == ("wrong", 42)
    assert "the loss of step 42 is 30, 14.9 times the median" in found.summary


def test_a_loss_that_jumps_close_to_zero_is_not_wrong(tmp_path: Path) -> None:
    losses = [max(2.0 * 0.9**step, 0.003 + 0.0001 * (step % 5)) for step in range(200)]
    losses[150] = 0.02
    assert wrong(noted(tmp_path, losses=losses)) is None
    losses[150] = 0.6
    assert wrong(noted(tmp_path, losses=losses)) is not None


def test_bad_steps_come_before_spikes(tmp_path: Path) -> None:
    bad = {"step": 6, "reason": "the loss is nan", "action": "skip", "sample_ids": list(range(20))}
    found = wrong(noted(tmp_path, ("bad", bad), ("bad", {**bad, "step": 9})))
    assert found is not None
    assert found.summary == "wrong: in step 7 the loss is nan"
    assert found.evidence == [
        "its samples were 0, 1, 2, 3, 4, 5, 6, 7 and 12 more",
        "2 steps were bad, the last was step 10: the loss is nan",
        "its update was left out",
    ]


def test_replicas_that_disagree_are_named_with_the_device(tmp_path: Path) -> None:
    corrupted = {"step": 50, "ranks": [1, 2], "reason": "silent corruption: w of rank 1, 2 is not the same"}
    found = wrong(noted(tmp_path, ("corrupted", corrupted), ("replay", {"step": 40, "ranks": [2]})))
    assert found is not None
    assert (found.kind, found.rank, found.step) == ("wrong", 2, 50)
    assert "rank 2 came to other bits: its device is bad" in found.evidence[-1]
    found = wrong(noted(tmp_path, ("replay", {"step": 40, "ranks": []})))
    assert found is not None
    assert "the fault has passed" in found.evidence[-1]
    assert found.rank == 2


def test_where_a_bad_number_came_from_is_told(tmp_path: Path) -> None:
    bad = {"step": 8, "reason": "the loss is nan", "action": "skip", "sample_ids": [3], "rank": 2, "module": "blocks.2"}
    found = wrong(noted(tmp_path, ("bad", {**bad, "where": "blocks.2 gives them, on rank 2", "found": []})))
    assert found is not None
    assert (found.rank, found.step, found.place) == (2, 9, "blocks.2")
    assert found.summary == "wrong: in step 9 the loss is nan: blocks.2 gives them, on rank 2"
    assert "blocks.2" in found.next


def test_weights_that_learn_nothing_are_named_until_they_do(tmp_path: Path) -> None:
    dead = {"step": 8, "steps": 8, "weights": ["0.weight", "0.bias"], "of": 4}
    found = wrong(noted(tmp_path, ("dead gradients", dead)))
    assert found is not None
    assert found.summary == "wrong: 0.weight, 0.bias have had no gradient but zeros in the 8 steps up to step 8"
    assert wrong(noted(tmp_path, ("dead gradients", {**dead, "weights": []}))) is None
