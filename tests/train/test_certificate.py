"""The certificate: given for just what was planned, done and saved."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from phalanx.events import EventLog
from phalanx.run import Run
from phalanx.train.certificate import NotDone, _again, certify, in_words
from phalanx.train.engine import Engine
from tests.checkpoints import checkpointing, manager_at, newest
from tests.tasks import Digits

TASK = Digits(steps=4)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path)
    with (
        Engine(TASK, device="cpu") as engine,
        EventLog(run, 0) as log,
        checkpointing(engine, run.checkpoints_path) as checkpointer,
    ):
        log.write("start", step=0, data=engine.order.size)
        for batch in engine.batches():
            log.write("step", **asdict(engine.step(batch)))
        checkpointer.save_now()
    return run


def rewritten(run: Run, change: Any) -> None:
    path = run.events_path(0)
    events = [change(event) for event in run.events(0)]
    path.write_text("".join(json.dumps(event) + "\n" for event in events if event is not None))


def test_a_finished_run_gets_one(run: Run) -> None:
    found = certify(run, TASK, manager_at(run.checkpoints_path))
    assert json.loads(run.certificate_path.read_text()) == found
    assert (found["steps"], found["samples"], found["repeated"], found["skipped"]) == (4, 32, 0, [])
    manifest = newest(run.checkpoints_path).manifest
    assert (found["hash"], found["state"]) == (manifest.hash(), manifest.hash(""))
    assert found["hash"] != found["state"]


@pytest.mark.parametrize(("how", "samples", "words"), [
    ("drop", 96, "1 of them is left out, others each time (last_batch=drop)"),
    ("merge", 98, "41 samples an epoch, its last step has 9 (last_batch=merge)"),
])  # fmt: skip
def test_what_an_epoch_leaves_out_is_in_it(how: Any, samples: int, words: str, tmp_path: Path) -> None:
    run, task = Run(tmp_path), Digits(steps=12, samples=41, last_batch=how)
    with (
        Engine(task, device="cpu") as engine,
        EventLog(run, 0) as log,
        checkpointing(engine, run.checkpoints_path) as checkpointer,
    ):
        log.write("start", step=0, data=engine.order.size, order=engine.order.facts())
        for batch in engine.batches():
            log.write("step", **asdict(engine.step(batch)))
        checkpointer.save_now()
    found = certify(run, task, manager_at(run.checkpoints_path))
    assert found["samples"] == samples
    assert words in found["epoch"]
    assert f"{samples} samples, none lost and none counted twice; {found['epoch']}" in in_words(found)


def test_steps_done_again_are_counted(run: Run) -> None:
    events = list(run.events(0))
    again = [*events[:3], {**events[0], "step": 1}, *events[2:]]
    run.events_path(0).write_text("".join(json.dumps(event) + "\n" for event in again))
    found = certify(run, TASK, manager_at(run.checkpoints_path))
    assert (found["repeated"], found["generations"]) == (1, 2)


def test_other_code_must_have_trained_on_the_same_samples(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "x")
    with EventLog(run, 0) as log:
        log.write("step", step=0, loss=1.0, samples="s")
        log.write("start", step=0, changes=["code: task.py is not what it was"], other_samples=False)
        log.write("step", step=0, loss=2.0, samples="s")
        assert list(_again(run)) == [None]
        log.write("step", step=0, loss=2.0, samples="others")
        with pytest.raises(NotDone, match="step 1 trained on other samples"):
            list(_again(run))
        log.write("start", step=0, changes=["seed was 0 and is 1"], other_samples=True)
        log.write("step", step=0, loss=2.0, samples="new")


def test_another_number_of_sites_has_other_losses_of_the_same_samples(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "x")
    with EventLog(run, 0) as log:
        for sites in (3, 2):
            log.write("start", step=0, layout=f"dp={sites},comm=local:2")
            log.write("step", step=0, loss=float(sites), samples="s")
        assert list(_again(run)) == [None]
        log.write("start", step=0, layout="dp=2,comm=local:2")
        log.write("step", step=0, loss=2.5, samples="s")
        assert list(_again(run)) == [None, 0.5]
        log.write("start", step=0, layout="dp=2,comm=local:2")
        log.write("step", step=0, loss=2.5, samples="others")
        with pytest.raises(NotDone, match="step 1 trained on other samples"):
            list(_again(run))


def test_what_is_not_shown_is_not_certified(run: Run) -> None:
    manager = manager_at(run.checkpoints_path)
    with pytest.raises(NotDone, match="2 of 6 planned steps were not done, step 5 among them"):
        certify(run, replace(TASK, steps=6), manager)
    with pytest.raises(NotDone, match="the state after step 3 was not saved"):
        certify(run, replace(TASK, steps=3), manager)
    before = run.events_path(0).read_text()
    rewritten(run, lambda event: None if event.get("step") == 2 and event["kind"] == "step" else event)
    with pytest.raises(NotDone, match="1 of 4 planned steps were not done, step 3 among them"):
        certify(run, TASK, manager)
    run.events_path(0).write_text(before)
    rewritten(run, lambda event: {**event, "samples": "others"} if event.get("step") == 2 else event)
    with pytest.raises(NotDone, match="step 3 trained on other samples"):
        certify(run, TASK, manager)
    assert not run.certificate_path.exists()


def test_it_says_what_came_of_it_and_when(run: Run) -> None:
    with EventLog(run, 0) as log:
        log.write("evaluation", step=4, held_out={"loss": 0.5})
    found = certify(run, TASK, manager_at(run.checkpoints_path))
    assert (found["task"], found["held_out"]) == ("Digits", {"loss": 0.5})
    assert found["loss"] == run.ledger()[3]["loss"]
    assert datetime.fromisoformat(found["finished"]).tzinfo is not None


def test_losses_that_were_no_numbers_are_not_the_same() -> None:
    found = {
        "repeated": 2,
        "difference": 0.0,
        "taken_up": 0,
        "left_out": [],
        "steps": 3,
        "samples": 9,
        "hash": "a" * 64,
    }
    assert "2 done again after failures, with the same loss to the last bit; weights" in in_words(found)
    assert "the same loss but for some that was not finite" in in_words(found | {"difference": None})
    assert "2 done again after failures, 1 of them with the same loss to the last bit;" in in_words(
        found | {"compared": 1}
    )
    assert "2 done again after failures; weights" in in_words(found | {"compared": 0})
    assert "the same loss up to 2.0e-16" in in_words(found | {"difference": 2e-16})
    change = {"step": 3, "changes": [f"setting {n} was 1 and is 2" for n in range(9)], "other_samples": False}
    many = in_words(found | {"changes": [change] * 5})
    assert many.count("after step 3: setting 0 was 1 and is 2") == 3
    assert "and 6 more; 2 more changes in certificate.json" in many


def test_a_loss_that_was_nan_once_is_told(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "x")
    with EventLog(run, 0) as log:
        for loss in (1.0, float("nan"), 1.0):
            log.write("step", step=0, loss=loss, samples="s")
    assert list(_again(run)) == [math.inf, math.inf]
