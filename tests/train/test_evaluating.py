"""A run's checkpoints evaluated: what training measured itself, under any layout, and on other data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import phalanx
from phalanx import WrongUse
from phalanx.train.evaluating import Evaluator
from tests.test_cli import GOOD, Done
from tests.test_cli import phalanx as command


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


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="holds no run"):
        Evaluator.of(tmp_path)
