"""``phalanx tune`` as a user meets it: rates and micro-batches tried on real ranks, and nothing left but one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.test_cli import phalanx

TASK = """
from dataclasses import dataclass
import os
import torch
from torch import nn
import phalanx

@dataclass
class Points(phalanx.Task):
    global_batch: int = 8
    most: int = 0
    wide: int = 4
    learning_rate: float = 1e-2

    def model(self):
        return Net(self.most, self.wide)

    def data(self):
        x = torch.randn(64, 4)
        return phalanx.data.Arrays(x=x, y=x[:, :3].argmax(1))

    def inputs(self, batch):
        return batch["x"]

    def loss(self, output, batch):
        return phalanx.losses.cross_entropy(output, batch["y"])

    def callbacks(self):
        return [Loud()]


class Loud(phalanx.Callback):
    def on_step(self, engine, metrics):
        open("called", "w").close()


class Net(nn.Module):
    def __init__(self, most, wide):
        super().__init__()
        self.most, self.wide = most, wide
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 3)

    def forward(self, x):
        if self.most and len(x) > self.most and os.environ.get("RANK") == "1":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        x = self.first(x).relu()
        if self.wide > 16:
            x = x + x.repeat_interleave(self.wide, 1).relu().unflatten(1, (16, self.wide)).mean(2)
        return self.last(x)
"""


def tuned(folder: Path, *words: str) -> Any:
    (folder / "points.py").write_text(TASK)
    done = phalanx("tune", *words, "--unchecked", "--json", cwd=folder)
    found = json.loads(done.stdout) if done.returncode in (0, 1) else {}
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} <= {"points.py", "tune.json"}, (
        "a half run is left"
    )
    return done, found


@pytest.mark.parametrize("layout", ["dp=1", "fsdp=2"])
def test_a_rate_is_found_drawn_and_written(tmp_path: Path, layout: str) -> None:
    done, found = tuned(tmp_path, "rate", "points.py", "--layout", layout, "--steps", "60", "--high", "100")
    assert done.returncode == 0, done.stderr
    assert 1e-4 < found["suggested"] < 1
    assert len(found["rates"]) == len(found["losses"]) <= 60
    assert found["diverged"]
    written = json.loads((tmp_path / "tune.json").read_text())
    assert written == {"task": "points.py", "layout": layout, "holds": True} | {
        n: found[n] for n in found if n != "summary"
    }


def test_the_curve_is_drawn_and_a_rate_said(tmp_path: Path) -> None:
    (tmp_path / "points.py").write_text(TASK)
    done = phalanx("tune", "rate", "points.py", "--steps", "40", "--out", "found/rate.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "└ 1.0e-06" in done.stdout
    assert "Train with it: --set learning_rate=" in done.stdout
    assert (tmp_path / "found" / "rate.json").exists()
    assert not (tmp_path / "called").exists()


def test_a_rate_that_nothing_learns_at_is_no_rate(tmp_path: Path) -> None:
    done, found = tuned(tmp_path, "rate", "points.py", "--steps", "10", "--low", "1e-12", "--high", "1e-10")
    assert done.returncode == 1
    assert found["suggested"] is None


def test_the_largest_micro_batch_that_no_rank_runs_out_of_memory_with(tmp_path: Path) -> None:
    words = ("--layout", "dp=2", "--set", "most=3", "--memory", "100GiB", "--steps", "1")
    done, found = tuned(tmp_path, "batch", "points.py", *words)
    assert done.returncode == 0, done.stderr
    assert found["largest"] == 3
    assert [(one["size"], one["fits"]) for one in found["tried"]] == [(1, True), (2, True), (4, False), (3, True)]


def test_the_layout_that_is_advised_can_be_trained_with(tmp_path: Path) -> None:
    (tmp_path / "points.py").write_text(TASK)
    words = ("--layout", "dp=2,micro_batch=1", "--memory", "100GiB", "--steps", "1", "--most", "2", "--unchecked")
    done = phalanx("tune", "batch", "points.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Train with it: --layout dp=2,micro_batch=2 --set global_batch=4, or a multiple" in done.stdout


def test_weights_that_begin_frozen_take_the_memory_that_they_will(tmp_path: Path) -> None:
    (tmp_path / "points.py").write_text(
        TASK.replace(
            "        x = self.first(x)", "        assert self.first.weight.requires_grad\n        x = self.first(x)"
        )
    )
    frozen = 'parameters={"first.*": {"frozen_steps": 100}}'
    words = ("--set", frozen, "--memory", "100GiB", "--steps", "1", "--most", "1", "--unchecked")
    done = phalanx("tune", "batch", "points.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_largest_micro_batch_by_memory_that_ranks_hold(tmp_path: Path) -> None:
    """Each sample holds 16 * 2^18 numbers several times over: 16 MiB each time."""
    words = ("batch", "points.py", "--set", "wide=262144", "--steps", "1")
    _, one = tuned(tmp_path, *words, "--most", "1", "--memory", "100GiB")
    limit = one["tried"][0]["peak"] + (200 << 20)
    done, found = tuned(tmp_path, *words, "--memory", str(limit), "--most", "16")
    assert done.returncode == 0, done.stderr
    assert 2 <= found["largest"] <= 12
    assert all((each["peak"] <= limit) == each["fits"] for each in found["tried"])
    done, found = tuned(tmp_path, *words, "--memory", "1MiB")
    assert done.returncode == 1
    assert found["largest"] == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("speed", "points.py"), "cannot be tuned. Choose rate or batch"),
        (("rate", "points.py", "--memory", "1GiB"), "--memory 1GiB is for phalanx tune batch"),
        (("batch", "points.py", "--low", "1"), "--low 1.0 is for phalanx tune rate"),
        (("batch", "points.py"), "on a CPU it must be said how much memory"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, words: tuple[str, ...], told: str) -> None:
    done, _ = tuned(tmp_path, *words, "--device", "cpu")
    assert done.returncode == 2
    assert told in done.stderr
