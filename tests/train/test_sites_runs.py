"""Whole runs of sites, as a user starts them: ended early, gone back, and certified by what all sites did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from phalanx import Run
from phalanx.data.order import Order
from phalanx.train.certificate import NotDone, certify
from tests.checkpoints import manager_at, newest
from tests.tasks import Digits
from tests.test_cli import GOOD, Done, phalanx

OWN = """

class Quits(phalanx.Callback):
    def on_step(self, engine, metrics):
        if engine.rank == 1 and engine.step_number == 3:
            engine.stop("rank 1 has seen enough")


@dataclass
class Quitting(Digits):
    def callbacks(self):
        return [Quits()]
"""
SAMPLES, SITE = 120, 4
"""Samples of a step that are a site's."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(GOOD + OWN)
    return tmp_path


def train(folder: Path, comm: str, *words: str, task: str = "own.py:Digits", bad: tuple[int, int] = (-1, 0)) -> Done:
    """``bad``: a step, and the site that has a sample in it which spoils it."""
    step, site = bad
    spoil = -1 if step < 0 else int(Order(SAMPLES, 2 * SITE, 0).ids(step)[site * SITE])
    return phalanx(
        "train", task, "--layout", f"dp=2,comm={comm}", "--on", "local:2", "--run", "run", "--unchecked", "--set",
        f"samples={SAMPLES}", "--set", f"spoil={spoil}", *words, cwd=folder,
    )  # fmt: skip


def assert_agreed(run: Run) -> None:
    """The weights that are left are those of every site, and what all have agreed on."""
    saved, left = newest(run.checkpoints_path), load_file(run.weights_path)
    for name, tensor in left.items():
        assert torch.equal(saved.tensor(f"model/{name}"), tensor), name
        for site in (0, 1):
            assert torch.equal(saved.tensor(f"sites/{site}/model/{name}"), tensor), name


def test_a_run_that_is_ended_early_leaves_what_all_have_agreed_on(folder: Path) -> None:
    done = train(folder, "diloco:8:fragments=2:overlap=1", "--steps", "20", task="own.py:Quitting")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "certificate: 8 steps of 20 planned, ended by the task (rank 1 has seen enough)" in done.stdout
    run = Run(folder / "run")
    assert_agreed(run)
    (told,) = run.events(0, "round")
    assert (told["step"], told["count"]) == (7, 8 * 2 * SITE)
    assert json.loads(run.certificate_path.read_text())["loss"] == told["loss"]


def test_a_bad_step_that_is_heard_of_late_is_gone_back_for_once(folder: Path) -> None:
    """It was before the state to which it goes back, which has yet to tell of it."""
    done = train(folder, "diloco:4:overlap=2", "--steps", "14", "--bad", "rollback", "--save-steps", "4", bad=(3, 1))
    assert done.returncode == 0, done.stdout + done.stderr
    run = Run(folder / "run")
    assert [(event["step"], event["left_out"]) for event in run.events(0, "rollback")] == [(4, [4, 5, 6, 7])]
    assert [event["step"] for event in run.events(0, "left out")] == [4, 5, 6, 7]
    assert json.loads(run.certificate_path.read_text())["skipped_by_sites"] == 1


def test_a_run_whose_last_steps_are_left_out_ends_with_what_all_have_agreed_on(folder: Path) -> None:
    done = train(folder, "diloco:4:fragments=2", "--steps", "10", "--bad", "rollback", "--save-steps", "4", bad=(9, 1))
    assert done.returncode == 0, done.stdout + done.stderr
    run = Run(folder / "run")
    assert json.loads(run.certificate_path.read_text())["left_out"] == [8, 9]
    assert_agreed(run)


@pytest.mark.parametrize("site", [0, 1])
def test_weights_for_which_no_good_step_of_a_site_speaks_are_not_certified(folder: Path, site: int) -> None:
    done = train(folder, "local:3", "--steps", "5", bad=(4, site))
    assert done.returncode == 1, done.stdout + done.stderr
    told = "the update of step 5 was left out (bad numbers in 1 step of sites since step 4)"
    assert told in done.stdout + done.stderr
    assert not Run(folder / "run").certificate_path.exists()


def test_a_bad_step_of_another_site_is_in_the_certificate(folder: Path) -> None:
    done = train(folder, "local:3", "--steps", "6", bad=(3, 1))
    assert done.returncode == 0, done.stdout + done.stderr
    run = Run(folder / "run")
    found = json.loads(run.certificate_path.read_text())
    assert (found["skipped"], found["skipped_by_sites"]) == ([], 1)
    rest = [event for event in run.events(0) if event["kind"] != "round"]
    run.events_path(0).write_text("".join(json.dumps(event) + "\n" for event in rest))
    with pytest.raises(NotDone, match="what all sites did up to step 6 is not in the run's events"):
        certify(run, Digits(steps=6, samples=SAMPLES), manager_at(run.checkpoints_path))
