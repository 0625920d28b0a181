"""What is other than when a state was saved is said, and refused where other samples would come."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from phalanx import EMA, Callback, Freeze, Layout, WrongUse
from phalanx.run import Run
from phalanx.train.engine import Engine
from phalanx.train.restoring import Restorer
from tests.checkpoints import checkpointing, manager_at
from tests.ranks import Ranks
from tests.tasks import Digits
from tests.test_cli import phalanx as call


@dataclass
class Changing(Digits):
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    options: dict[str, Any] = field(default_factory=dict)
    shift: float = 0.0
    unrepeatable: bool = False

    def data(self) -> Any:
        points = super().data()
        points.columns["x"] = points.columns["x"] + self.shift
        return Unrepeatable(points) if self.unrepeatable else points

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=self.learning_rate, betas=(self.betas[0], self.betas[1]))


class Unrepeatable:
    count = itertools.count()

    def __init__(self, points: Any) -> None:
        self.points = points

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.points[index], "number": next(self.count)}


def saved(task: Digits, folder: Path, layout: str | None = None) -> None:
    with Engine(task, layout, device="cpu") as engine, checkpointing(engine, folder) as checkpointer:
        for batch in itertools.islice(engine.batches(), 3):
            engine.step(batch)
        checkpointer.save_now()


def taken_up(task: Digits, folder: Path, allow: bool = False, layout: str | None = None) -> list[str]:
    with Engine(task, layout, device="cpu", allow_changes=allow) as engine:
        Restorer(engine, manager_at(folder)).restore()
        assert engine.step_number == 3
        return engine.changes


def test_nothing_is_said_where_nothing_changed(tmp_path: Path) -> None:
    saved(Changing(options={"a": [1, 2]}), tmp_path)
    assert taken_up(Changing(options={"a": [1, 2]}), tmp_path) == []


def test_settings_schedule_and_optimizer_are_said_in_a_line_each(tmp_path: Path) -> None:
    task = Changing()
    saved(task, tmp_path)
    assert taken_up(replace(task, options={"a": 1}), tmp_path) == ["options was {} and is {'a': 1}"]
    assert taken_up(replace(task, evaluate_every=2), tmp_path) == ["evaluate_every was 0 and is 2"]
    steps, schedule = taken_up(replace(task, steps=12), tmp_path)
    assert steps == "steps was 6 and is 12"
    old, new = task.schedule()(3), replace(task, steps=12).schedule()(3)
    assert schedule == f"the schedule gives step 4 {new:.4g} of the learning rate, and gave it {old:.4g}"
    assert taken_up(replace(task, learning_rate=0.5), tmp_path) == ["learning_rate was 0.01 and is 0.5"]
    assert taken_up(replace(task, betas=[0.8, 0.95]), tmp_path) == ["betas was [0.9, 0.95] and is [0.8, 0.95]"]


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        ("exact", "bf16", ["comm was exact and is bf16"]),
        ("int4", "exact", ["comm was int4 and is exact: what was still owed of gradients is left out"]),
        ("bf16", "bf16", []),
    ],
)
def test_another_comm_is_said_in_one_line(ranks: Ranks, tmp_path: Path, then: str, now: str, words: list[str]) -> None:
    ranks(2, saved, Changing(), tmp_path, f"dp=2,comm={then}")
    assert ranks(2, taken_up, Changing(), tmp_path, False, f"dp=2,comm={now}") == [words, words]


APART, TOGETHER = "dp=2,comm=diloco:3:overlap=1", "dp=2,comm=diloco:3"
AVERAGED = "what the optimizers of 2 sites kept is averaged"
THREE = "there were 2 sites and are 3: "
NO_SITES = "comm was diloco:3 and is exact: "
NO_MIX = "mix is no more: what a site changes while weights travel is added to what arrives, whole"
CARRIED = "what the outer optimizer carried on is left out"


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        (TOGETHER, TOGETHER, []),
        (TOGETHER, "dp=3,comm=diloco:3", [f"{THREE}{AVERAGED}"]),
        (TOGETHER, "fsdp=2", [f"{NO_SITES}{AVERAGED}; {CARRIED}"]),
        (APART, "dp=3,comm=diloco:3", [f"comm was diloco:3:overlap=1 and is diloco:3: {THREE}{AVERAGED}, and so are "
                                       "their weights"]),
        (APART, "dp=1", ["comm was diloco:3:overlap=1 and is exact: "
                         f"{AVERAGED}, and so are their weights; {CARRIED}"]),
        (APART, TOGETHER, ["comm was diloco:3:overlap=1 and is diloco:3: the mean of what sites have of weights is "
                           "what all go on with"]),
        (TOGETHER, "dp=2,comm=local:3", [f"comm was diloco:3 and is local:3: {CARRIED}"]),
        ("dp=2,comm=local:3", "fsdp=2", [f"comm was local:3 and is exact: {AVERAGED}"]),
        (f"{TOGETHER}:momentum=0", "fsdp=2", [f"comm was diloco:3:momentum=0 and is exact: {AVERAGED}"]),
        (TOGETHER, f"{TOGETHER}:momentum=0", [f"comm was diloco:3 and is diloco:3:momentum=0: {CARRIED}"]),
        (f"{APART}:mix=0.5", APART, [NO_MIX]),
        (f"{APART}:mix=0.5", f"{APART}:int8", ["comm was diloco:3:overlap=1:mix=0.5 and is diloco:3:overlap=1:int8",
                                               NO_MIX]),
    ],
)  # fmt: skip
def test_other_sites_are_said(ranks: Ranks, tmp_path: Path, then: str, now: str, words: list[str]) -> None:
    ranks(2, saved, Changing(), tmp_path, then)
    world = Layout.parse(now).world
    assert ranks(world, taken_up, Changing(), tmp_path, False, now) == [words] * world


def resumed(task: Digits, folder: Path, layout: str, **facts: Any) -> list[str]:
    with Engine(task, layout, device="cpu") as engine:
        engine.resume({**manager_at(folder).open(3).manifest.facts, **facts})
        return engine.changes


def test_another_outer_optimizer_of_the_same_sites_is_said(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, saved, Changing(), tmp_path, TOGETHER)
    assert ranks(2, resumed, Changing(), tmp_path, TOGETHER) == [[], []]
    said = ["rate and momentum of the outer optimizer were 0.7 and 0.9 and are 0.9 and 0.2"]
    assert ranks(2, partial(resumed, outer=[0.7, 0.9]), Changing(), tmp_path, TOGETHER) == [said, said]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"global_batch": 10}, "global_batch was 8 and is 10"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"samples": 41}, "there were 40 samples to train on and are 41"),
        ({"balance": "y"}, "balance was none and is y"),
        ({"shift": 1.0}, r"the data is not what it was: 6 of 6 samples .* \(39, 0, \d+, \d+ and 2 more\)"),
    ],
)  # fmt: skip
def test_other_samples_are_refused_unless_they_are_allowed(change: Any, words: str, tmp_path: Path) -> None:
    saved(Changing(), tmp_path)
    changed = replace(Changing(), **change)
    with pytest.raises(WrongUse, match=f"{words}.*: the samples to come would be others.*--allow changes"):
        taken_up(changed, tmp_path)
    assert any(re.search(words, told) for told in taken_up(changed, tmp_path, allow=True))


def test_another_last_batch_is_refused_where_there_is_one(tmp_path: Path) -> None:
    saved(Changing(samples=41), tmp_path / "uneven")
    with pytest.raises(WrongUse, match="last_batch was keep and is merge: the samples to come would be others"):
        taken_up(Changing(samples=41, last_batch="merge"), tmp_path / "uneven")
    saved(Changing(), tmp_path / "even")
    assert taken_up(Changing(last_batch="merge"), tmp_path / "even") == ["last_batch was keep and is merge"]


@dataclass
class Weighted(Changing):
    weight: ClassVar[float] = 2.0

    def sample_weights(self, data: Any) -> Any:
        return [self.weight, *[1.0] * (len(data) - 1)]


def test_other_weights_of_samples_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(Weighted(), tmp_path)
    assert taken_up(Weighted(), tmp_path) == []
    monkeypatch.setattr(Weighted, "weight", 3.0)
    with pytest.raises(WrongUse, match="samples were drawn by other weights, or are of other classes: the samples to"):
        taken_up(Weighted(), tmp_path)


@dataclass
class Calling(Digits):
    average: bool = True

    def callbacks(self) -> list[Callback]:
        return [EMA(0.5)] if self.average else [Freeze("0.*", since=2)]


def test_other_callbacks_are_said(tmp_path: Path) -> None:
    saved(Calling(), tmp_path)
    assert taken_up(Calling(average=False), tmp_path) == [
        "average was True and is False",
        "the callback EMA is left out, with what it may have kept",
        "the callback Freeze is new",
    ]


def test_data_that_is_never_the_same_is_not_compared(tmp_path: Path) -> None:
    saved(Changing(unrepeatable=True), tmp_path)
    (words,) = taken_up(Changing(unrepeatable=True), tmp_path)
    assert words.startswith("the data is not repeatable")


def test_what_an_older_version_saved_is_compared_as_far_as_it_goes(tmp_path: Path) -> None:
    saved(Changing(), tmp_path)
    manager = manager_at(tmp_path)
    facts = manager.open(3).manifest.facts
    for name in ("settings", "optimizer", "files", "fingerprint"):
        del facts[name]
    with Engine(replace(Changing(), steps=9), device="cpu") as engine:
        engine.resume(facts)
        assert engine.changes == []
    with Engine(replace(Changing(), seed=9), device="cpu") as engine, pytest.raises(WrongUse, match="seed was 0"):
        engine.resume(facts)


def _described(task: Digits) -> str:
    with Engine(task, device="cpu") as engine:
        return json.dumps(engine.described)


def test_a_state_is_described_alike_at_any_number_of_ranks(ranks: Ranks) -> None:
    (alone,) = ranks(1, _described, Changing())
    assert len(json.loads(alone)["fingerprint"]["samples"]) == 6
    for world in (2, 3):
        assert ranks(world, _described, Changing()) == [alone] * world


TASK = """
from dataclasses import dataclass
import torch
from torch import nn
import phalanx
import shapes


@dataclass
class Mine(phalanx.Task):
    global_batch: int = 4
    steps: int = 2
    warmup_steps: int = 0
    def model(self): return nn.Linear(3, 2)
    def data(self): return phalanx.data.Arrays(x=shapes.points(), y=torch.arange(12) % 2)
    def inputs(self, batch): return batch["x"]
    def loss(self, output, batch): return phalanx.losses.cross_entropy(output, batch["y"])
"""
POINTS = "import torch\n\ndef points():\n    return torch.arange(36.0).reshape(12, 3) / 36\n"


def test_a_run_that_goes_on_with_other_code_and_data_says_so(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    (tmp_path / "shapes.py").write_text(POINTS)
    assert call("train", "mine.py", "--run", "r", cwd=tmp_path).returncode == 0
    same = call("train", "--resume", "--run", "r", "--steps", "3", cwd=tmp_path)
    assert same.returncode == 0, same.stderr
    assert "changed  steps was 2 and is 3\nchanged  the schedule gives step 3 " in same.stdout
    (tmp_path / "shapes.py").write_text(POINTS + "\n# a comment\n")
    edited = call("train", "--resume", "--run", "r", "--steps", "4", cwd=tmp_path)
    assert edited.returncode == 0, edited.stderr
    assert "changed  code: shapes.py is not what it was" in edited.stdout
    (tmp_path / "shapes.py").write_text(POINTS.replace("/ 36", "/ 35"))
    other = call("train", "--resume", "--run", "r", "--steps", "6", cwd=tmp_path)
    assert other.returncode == 2
    assert "the data is not what it was" in other.stderr
    assert "Traceback" not in other.stderr
    allowed = call("train", "--resume", "--run", "r", "--steps", "6", "--allow", "changes", cwd=tmp_path)
    assert allowed.returncode == 0, allowed.stderr
    assert "some perhaps twice and some never" in allowed.stdout
    certificate = json.loads((tmp_path / "r" / "final" / "certificate.json").read_text())
    assert [change["step"] for change in certificate["changes"]] == [2, 3, 4]
    assert [change["other_samples"] for change in certificate["changes"]] == [False, False, True]
    assert "allow" not in Run(tmp_path / "r").settings()["run"]
    batch = call("train", "--resume", "--run", "r", "--steps", "9", "--set", "global_batch=6", cwd=tmp_path)
    assert batch.returncode == 2
    allowed = call(
        "train", "--resume", "--run", "r", "--steps", "9", "--set", "global_batch=6", "--allow", "changes", cwd=tmp_path
    )
    assert allowed.returncode == 0, allowed.stderr
    assert call("train", "mine.py", "--allow", "anything", cwd=tmp_path).returncode == 2
