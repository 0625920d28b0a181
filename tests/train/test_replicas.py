"""Silent corruption: a rank whose bits differ is named, and the run goes on from before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx import Engine, Layout, Run
from phalanx.train.replicas import Corrupted, comparable, compare
from tests.ranks import Ranks
from tests.tasks import Digits
from tests.test_cli import phalanx

TASK = '''
import os
from dataclasses import dataclass
from pathlib import Path
import torch
from torch import nn
import phalanx


class Poisoned(nn.Linear):
    """A device that, where a file says so, computes wrongly: once, or always."""

    def forward(self, x):
        poison = Path("poison")
        if self.training and os.environ.get("RANK") == "1" and poison.exists():
            if poison.read_text() == "once":
                poison.unlink()
            self.weight.data.view(-1)[3] += 1e-3
        return super().forward(x)


@dataclass
class Fragile(phalanx.Task):
    global_batch: int = 24
    steps: int = 16

    def model(self):
        return nn.Sequential(Poisoned(8, 5), nn.ReLU(), nn.Linear(5, 3))

    def data(self):
        made = torch.Generator().manual_seed(1)
        return phalanx.data.Arrays(x=torch.randn(400, 8, generator=made), y=torch.randint(0, 3, (400,), generator=made))

    def inputs(self, batch):
        return batch["x"]

    def loss(self, output, batch):
        return phalanx.losses.cross_entropy(output, batch["y"])
'''


def flipped(layout: str, wrong: int, whole: bool) -> Any:
    with Engine(Digits(), layout) as engine:
        for batch in engine.batches():
            engine.step(batch)
        assert comparable(engine)
        compare(engine)
        if engine.environment.rank == wrong:
            weight = engine.spread.weights["2.weight"]
            (weight.full if whole else weight.shard).data.view(-1)[0] += 1e-7
        try:
            compare(engine)
        except Corrupted as corruption:
            return corruption.where, corruption.ranks, corruption.sure
        return None


@pytest.mark.parametrize(
    ("layout", "wrong", "whole", "named", "sure"),
    [
        ("dp=4", 2, False, [2], True),
        ("dp=2", 1, False, [0, 1], False),
        ("dp=4,fsdp=2", 5, False, [5], True),
        ("fsdp=4,zero=2", 3, True, [3], True),
    ],
)
def test_who_differs_is_named(ranks: Ranks, layout: str, wrong: int, whole: bool, named: list[int], sure: bool) -> None:
    found = ranks(Layout.parse(layout).world, flipped, layout, wrong, whole)
    assert found == [("2.weight", named, sure)] * len(found)


def shared(layout: str) -> bool:
    with Engine(Digits(), layout) as engine:
        return comparable(engine)


def test_shards_alone_have_nobody_to_compare_with(ranks: Ranks) -> None:
    assert ranks(2, shared, "fsdp=2") == [False, False]


def test_a_run_goes_back_to_before_it_was_corrupted(tmp_path: Path) -> None:
    (tmp_path / "fragile.py").write_text(TASK)
    words = ("train", "fragile.py", "--on", "local:4", "--compare-steps", "6", "--save-steps", "3", "--keep", "1")
    calm = phalanx(*words, "--run", "calm", cwd=tmp_path)
    assert calm.returncode == 0, calm.stderr
    half = phalanx(*words, "--run", "rough", "--steps", "6", cwd=tmp_path)
    assert half.returncode == 0, half.stderr
    (tmp_path / "poison").write_text("once")
    rough = phalanx("train", "--resume", "--run", "rough", "--steps", "16", cwd=tmp_path)
    assert rough.returncode == 0, rough.stderr
    assert "silent corruption: 0.weight of rank 1 differs from the others'" in rough.stderr
    run = Run(tmp_path / "rough")
    assert [event["ranks"] for event in run.events(0) if event["kind"] == "corrupted"] == [[1]]
    assert list(run.checkpoints_path.glob("distrusted-*"))


def test_a_device_that_is_always_wrong_ends_an_exact_run(tmp_path: Path) -> None:
    (tmp_path / "fragile.py").write_text(TASK)
    (tmp_path / "poison").write_text("always")
    done = phalanx(
        "train", "fragile.py", "--on", "local:4", "--exact", "--compare-steps", "4", "--run", "one", cwd=tmp_path
    )
    assert done.returncode == 1
    assert "rank 1 computes other bits than most" in done.stderr
