"""Epochs beside steps: what they come to, which of the two counts, and what a run's folder says of it."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

import phalanx
from phalanx import Run
from phalanx.data.order import Order
from phalanx.settings import make_task, over
from tests.tasks import Digits
from tests.test_cli import phalanx as run_phalanx

TASK = Path(__file__).with_name("tasks.py")


@pytest.mark.parametrize(
    ("epochs", "batch", "steps"), [(2, 8, 10), (1, 7, 6), (2, 7, 12), (0.5, 8, 2), (0.01, 8, 1), (1.5, 10, 6)]
)
def test_steps_follow_from_the_data(epochs: float, batch: int, steps: int) -> None:
    task = Digits(epochs=epochs, global_batch=batch)
    with phalanx.Engine(task, device="cpu") as engine:
        assert task.steps == steps
        assert [b.step for b in engine.batches()] == list(range(steps))
    with phalanx.Engine(task, device="cpu"):
        assert task.steps == steps
    assert task.schedule()(steps) == Digits(steps=steps, global_batch=batch).schedule()(steps)


def test_one_of_the_two() -> None:
    Digits(epochs=2, steps=10).plan_steps(40, Order(40, 8).steps_in)  # 10 is what two epochs come to
    with pytest.raises(phalanx.WrongUse, match=r"steps=11 and epochs=2 do not agree: .* 40 samples has 5 steps"):
        Digits(epochs=2, steps=11).plan_steps(40, Order(40, 8).steps_in)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(phalanx.WrongUse, match="epochs="):
            Digits(epochs=wrong).check()


def test_what_is_given_now_counts() -> None:
    saved = {"steps": 10, "epochs": 2.0, "width": 8}
    assert over(saved, {"epochs": 3}) == {"epochs": 3, "width": 8}
    assert over(saved, {"steps": 30}) == {"steps": 30, "epochs": 0, "width": 8}
    assert over(saved, {"steps": 30, "epochs": 6}) == {"steps": 30, "epochs": 6, "width": 8}
    assert over(saved, {}) == {"epochs": 2.0, "width": 8}  # data may have grown since
    assert over({}, {"width": 9}) == {"width": 9}

    @dataclass
    class Passes(Digits):
        epochs: float = 3

    task = make_task(Passes, over({}, {"steps": "4"}))
    task.plan_steps(40, Order(40, 8).steps_in)
    assert task.steps == 4


def test_a_run_by_epochs_goes_on_by_more(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = run_phalanx("train", str(TASK), "--epochs", "2", "--on", "local:2", "--run", str(folder), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    settings = tomllib.loads((folder / "run.toml").read_text())["settings"]
    assert (settings["steps"], settings["epochs"]) == (10, 2.0)
    certificate = json.loads(Run(folder).certificate_path.read_text())
    assert (certificate["steps"], certificate["samples"]) == (10, 80)
    more = run_phalanx("train", "--resume", "--run", str(folder), "--epochs", "3", cwd=tmp_path)
    assert more.returncode == 0, more.stderr
    assert json.loads(Run(folder).certificate_path.read_text())["steps"] == 15
    settings = tomllib.loads((folder / "run.toml").read_text())["settings"]
    assert (settings["steps"], settings["epochs"]) == (15, 3.0)
    again = run_phalanx("train", "--config", str(folder / "run.toml"), "--run", str(tmp_path / "again"), cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert json.loads(Run(tmp_path / "again").certificate_path.read_text())["steps"] == 15
    both = run_phalanx("train", str(TASK), "--epochs", "2", "--steps", "11", cwd=tmp_path)
    assert both.returncode == 2
    assert "do not agree" in both.stderr
