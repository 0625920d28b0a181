"""A run's folders: what its task's paths mean, from wherever it is gone on with."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from phalanx import Run
from phalanx.train.folders import where_it_began
from tests.test_cli import phalanx

TASK = """
from dataclasses import dataclass
from pathlib import Path
import torch
from torch import nn
import phalanx


@dataclass
class Mine(phalanx.Task):
    global_batch: int = 4
    steps: int = 2
    path: Path = Path("data/points.pt")

    def model(self): return nn.Linear(3, 2)
    def data(self): return phalanx.data.Arrays(x=torch.load(self.path), y=torch.arange(12) % 2)
    def inputs(self, batch): return batch["x"]
    def loss(self, output, batch): return phalanx.losses.cross_entropy(output, batch["y"])
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    import torch

    project = tmp_path / "project"
    (project / "data").mkdir(parents=True)
    (project / "tasks").mkdir()
    (tmp_path / "elsewhere").mkdir()
    torch.save(torch.randn(12, 3), project / "data" / "points.pt")
    (project / "tasks" / "mine.py").write_text(TASK)
    assert phalanx("train", "tasks/mine.py", "--run", "r", cwd=project).returncode == 0
    return project


@pytest.mark.parametrize("words", [(), ("../project/tasks/mine.py",)])
def test_a_run_goes_on_from_another_folder(project: Path, words: tuple[str, ...]) -> None:
    elsewhere = project.parent / "elsewhere"
    done = phalanx("train", *words, "--resume", "--run", "../project/r", "--steps", "3", cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert f"relative paths of the task are those of {project}" in done.stdout
    assert not list(elsewhere.iterdir())
    done = phalanx("train", *words, "--resume", "--run", "../project/r", "--steps", "4", cwd=project / "tasks")
    assert done.returncode == 2, "../project is not there from here"
    again = phalanx("train", "--resume", "--run", "r", "--steps", "4", cwd=project)
    assert again.returncode == 0, again.stderr
    assert "relative paths" not in again.stdout
    assert Run(project / "r").settings()["run"]["folder"] == str(project)


def test_where_an_option_points_to_is_meant_from_here(project: Path) -> None:
    elsewhere = project.parent / "elsewhere"
    shutil.move(project / "r" / "checkpoints", elsewhere / "kept")
    done = phalanx("train", "--resume", "--run", "../project/r", "--steps", "3", "--checkpoints", "kept", cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert (elsewhere / "kept" / "step-00000003").is_dir()


def test_a_run_is_repeated_from_another_folder(project: Path) -> None:
    elsewhere = project.parent / "elsewhere"
    done = phalanx("train", "--config", "../project/r/run.toml", "--run", "again", cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert f"relative paths of the task are those of {project}" in done.stdout
    hashes = [
        json.loads((run / "final" / "certificate.json").read_text())["hash"]
        for run in (project / "r", elsewhere / "again")
    ]
    assert hashes[0] == hashes[1]


def test_where_that_folder_is_gone_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run.create("r", "x")
    assert where_it_began(run.path, None, "gpt") == (run.path, None, "gpt"), "it has not begun"
    run.write_settings({"run": {"task": "gpt"}})
    assert where_it_began(run.path, None, "gpt") == (run.path, None, "gpt"), "of an older version"
    run.write_settings({"run": {"task": "gpt", "folder": str(tmp_path / "gone")}})
    assert where_it_began(run.path, None, "gpt") == (run.path, None, "gpt")
    assert f"which is not there: relative paths are those of {os.getcwd()}" in capsys.readouterr().out
