"""A run's checkpoints evaluated: what training measured itself, under any layout, and on other data."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import phalanx
from phalanx import CannotHere, WrongUse
from phalanx.train.beforehand import FILE
from phalanx.train.evaluating import Evaluator
from phalanx.train.exporting import export_run
from tests.tasks import Digits
from tests.test_cli import GOOD, Done
from tests.test_cli import phalanx as command
from tests.train.test_beforehand import FromWhereItBegan, Points

OF_SITES = "dp=2,comm=diloco:4:fragments=2:overlap=1"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps, with checkpoints at three and six."""
    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "task.py").write_text(GOOD)
    words = ["train", "task.py", "--run", "run", "--steps", "6", "--save-steps", "3", "--device", "cpu", "--layout"]
    done = command(*words, "dp=2", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def told(run: Path, *words: str) -> dict[str, Any]:
    done: Done = command("evaluate", str(run), "--json", *words, cwd=run.parent)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def ended(run: Path) -> dict[str, float]:
    (event,) = phalanx.Run(run).events(0, "end")
    return event["held_out"]


def test_measures_are_those_that_training_found(run: Path) -> None:
    expected = ended(run)
    assert expected
    for words in ([], ["--layout", "fsdp=2"], ["--layout", "dp=1"]):
        found = told(run, *words)
        assert found["step"] == 6
        assert found["measures"] == pytest.approx(expected, rel=1e-5)
    assert told(run, "--checkpoint", "3")["measures"] != pytest.approx(expected, rel=1e-5)
    assert told(run, "--data", "training")["measures"] != pytest.approx(expected, rel=1e-5)
    events = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events[-2:]] == [3, 6]
    assert events[0]["held_out"] == pytest.approx(expected, rel=1e-5)


def test_a_run_of_several_hosts_is_evaluated_by_as_many_ranks_here(run: Path, tmp_path: Path) -> None:
    copytree(run, tmp_path / "run")
    words = (run / "run.toml").read_text()
    on_two = words.replace('on = "local:2"', 'on = "local:1"\nmax_nodes = 2\nmin_nodes = 2\nmeet = "localhost:1"')
    assert on_two != words
    (tmp_path / "run" / "run.toml").write_text(on_two)
    found = Evaluator.of(tmp_path / "run")
    assert (found.job.cluster.world, str(found.job.layout)) == (2, "dp=2")
    assert found.evaluate(6).measures == pytest.approx(ended(run), rel=1e-5)


@pytest.mark.parametrize(
    "layout", ["dp=2,comm=diloco:2", "dp=2,comm=diloco:2:overlap=1", "dp=2,comm=local:4:fragments=2"]
)
def test_a_layout_whose_sites_train_by_themselves_measures_what_was_saved(run: Path, layout: str) -> None:
    assert told(run, "--layout", layout)["measures"] == pytest.approx(ended(run), rel=1e-5)


@pytest.fixture(scope="module")
def of_sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose sites have weights of their own, also at the step of its first checkpoint."""
    folder = tmp_path_factory.mktemp("sites")
    (folder / "task.py").write_text(GOOD)
    words = ["train", "task.py", "--run", "run", "--steps", "6", "--save-steps", "3", "--device", "cpu", "--layout"]
    done = command(*words, OF_SITES, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_what_sites_agreed_on_is_measured_under_any_layout(of_sites: Path) -> None:
    assert told(of_sites)["measures"] == pytest.approx(ended(of_sites), rel=1e-5)
    for step in ("4", "6"):  # what is asked for at 3 is saved when all have agreed
        found = [told(of_sites, "--checkpoint", step, "--layout", layout)["measures"] for layout in ("dp=1", OF_SITES)]
        assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="holds no run"):
        Evaluator.of(tmp_path)


BEGAN = """
from dataclasses import dataclass
from tests.train.test_beforehand import FromWhereItBegan

@dataclass
class Began(FromWhereItBegan):
    def model(self):
        model = super().model()
        model[0].requires_grad_(False)
        return model
"""


@pytest.fixture(scope="module")
def began(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that begins in a folder, with frozen weights and with columns that are computed beforehand."""
    folder = tmp_path_factory.mktemp("began")
    (folder / "task.py").write_text(BEGAN)
    (folder / "base").mkdir()
    with phalanx.Engine(FromWhereItBegan(seed=5), device="cpu") as engine:
        weights = {name: value.clone() for name, value in engine.whole_weights().items()}
    save_file(weights, folder / "base" / "model.safetensors")
    words = ["train", "task.py", "--run", "run", "--init-from", "base", "--steps", "8", "--device", "cpu"]
    done = command(*words, "--set", "warmup_steps=0", "--set", "learning_rate=0.05", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def expected_loss(run: Path, points: Points) -> float:
    """By the whole models, of the beginning and of the end."""
    if not (to := run.parent / "exported").exists():
        export_run(run, to)
    model, x = FromWhereItBegan().model(), torch.stack([points[index]["x"] for index in range(len(points))])
    outputs = []
    with torch.no_grad():
        for folder in (run.parent / "base", to):
            model.load_state_dict(load_file(folder / "model.safetensors"))
            outputs.append(model(x))
    return float((outputs[1] - outputs[0] - 1).square().sum()) / len(points)


def evaluated(run: Path, *assignments: str, data: str = "held-out") -> float:
    evaluator = Evaluator.of(run, assignments=assignments, data=data, device="cpu")
    return evaluator.evaluate(evaluator.chosen()).measures["loss"]


def test_samples_know_what_was_computed_beforehand_and_frozen_weights_are_those_of_its_folder(began: Path) -> None:
    assert told(began, "--device", "cpu")["measures"]["loss"] == pytest.approx(
        expected_loss(began, Points(7, 0.5)), rel=1e-4
    )
    assert evaluated(began, data="training") == pytest.approx(expected_loss(began, Points(13)), rel=1e-4)


def test_other_rows_are_known_too_and_nothing_of_them_is_kept(began: Path) -> None:
    kept = (began / FILE).read_bytes()
    found = evaluated(began, "shift=0.3", data="training")
    assert found == pytest.approx(expected_loss(began, Points(13, 0.3)), rel=1e-4)
    assert evaluated(began, "shift=0.3") == pytest.approx(expected_loss(began, Points(7, 0.5)), rel=1e-4)
    with pytest.raises(CannotHere, match="is of other settings or samples than the run has now"):
        evaluated(began, "seed=3", "shift=0.3")
    assert (began / FILE).read_bytes() == kept


def test_fewer_samples_than_a_batch_are_evaluated_and_not_trained_on() -> None:
    few = Digits(samples=3, global_batch=8)
    with phalanx.Engine(few, device="cpu", evaluates="data") as engine:
        engine.held_out = engine.in_order(engine.loader.reader.data, "data")
        assert engine.evaluate()["loss"] > 0
    with pytest.raises(WrongUse, match="3 samples, fewer than one batch of 8"):
        phalanx.Engine(few, device="cpu")
