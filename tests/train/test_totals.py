"""Losses by name: each over its own count, at any number of ranks and micro-batches, logged apart."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import phalanx
from phalanx import Layout, Loss, WrongUse
from phalanx.train.totals import added_up, spelled_out
from tests.comparing import ByHand, Named
from tests.parity import TOLERANCE, Trace, difference, reference, spread_run
from tests.ranks import RankFailed, Ranks
from tests.tasks import Digits
from tests.test_cli import phalanx as command

LAYOUTS = {
    1: ["dp=1", "micro_batch=7"],
    2: ["dp=2", "fsdp=2,micro_batch=5,zero=2", "tp=2", "cp=2,micro_batch=9", "pp=2,schedule=gpipe", "dp=2,exact=2"],
    4: ["dp=4,micro_batch=2", "dp=2,fsdp=2", "fsdp=2,pp=2"],
}


def run(task: phalanx.Task, layouts: list[str]) -> list[Trace]:
    return [spread_run(task, Layout.parse(layout)) for layout in layouts]


@pytest.mark.parametrize("world", LAYOUTS)
def test_each_loss_is_divided_by_its_own_count(ranks: Ranks, world: int) -> None:
    expected = reference(ByHand())
    for layout, found in zip(LAYOUTS[world], ranks(world, run, Named(), LAYOUTS[world])[0], strict=True):
        error, where = difference(found, expected)
        assert error < TOLERANCE, (layout, where)


def test_equal_counts_need_no_second_run(ranks: Ranks) -> None:
    layouts = ["pp=2,micro_batch=8", "dp=2,exact=4", "dp=2,micro_batch=5"]
    expected = reference(ByHand(even=True))
    for layout, found in zip(layouts, ranks(2, run, Named(even=True), layouts)[0], strict=True):
        error, where = difference(found, expected)
        assert error < TOLERANCE, (layout, where)
    with phalanx.Engine(Named(even=True), Layout(micro_batch=5), device="cpu") as engine:
        engine.step(next(iter(engine.batches())))
        assert not engine.spread.samples.all_at_once


def test_a_pipeline_of_several_refuses_different_counts(ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match=r"different counts \(token [\d.]+, first 93, rare \d+\).*one micro-batch"):
        ranks(2, run, Named(), ["pp=2,micro_batch=8"])


def named(task: phalanx.Task, layout: str) -> list[tuple[float, dict[str, float]]]:
    with phalanx.Engine(task, Layout.parse(layout), device="cpu") as engine:
        found = [(m.loss, m.losses) for m in map(engine.step, engine.batches())]
        return [*found, (0.0, engine.evaluate())]


@dataclass
class Several(Digits):
    precision: str = "float64"
    renames: bool = False

    def loss(self, output: Tensor, batch: dict[str, Any]) -> Loss:
        large = phalanx.losses.cross_entropy(output, batch["y"].where(batch["x"][:, 0] > 0, -100))
        name = "other" if self.renames and int(batch["y"].sum()) % 2 else "large"
        return phalanx.losses.sum(size=0.1 * phalanx.losses.mean_squared_error(output, output * 0), **{name: large})


def test_they_are_logged_apart_and_add_up(ranks: Ranks) -> None:
    expected = named(Several(), "dp=1")
    for loss, parts in expected[:-1]:
        assert list(parts) == ["size", "large"]
        assert sum(parts.values()) == pytest.approx(loss, rel=1e-12)
    held_out = expected[-1][1]
    assert held_out["loss"] == pytest.approx(held_out["loss/size"] + held_out["loss/large"])
    for layout in ("dp=2", "fsdp=2,micro_batch=2"):
        for (loss, parts), (want, wanted) in zip(ranks(2, named, Several(), layout)[1], expected, strict=True):
            assert loss == pytest.approx(want, rel=1e-9)
            assert parts == pytest.approx(wanted, rel=1e-9)


def test_every_stage_of_a_pipeline_knows_their_names(ranks: Ranks) -> None:
    first, last = ranks(2, spread_names, Named(steps=1), "pp=2")
    assert first == last
    assert list(first) == ["token", "first", "rare"]


def spread_names(task: phalanx.Task, layout: str) -> dict[str, float]:
    with phalanx.Engine(task, Layout.parse(layout), device="cpu") as engine:
        return engine.step(next(iter(engine.batches()))).losses


def test_names_that_change_are_refused() -> None:
    with pytest.raises(WrongUse, match=r"gets size, other here, and got size, large before.*0 \* output\.sum"):
        named(Several(renames=True), "dp=1")


@dataclass
class Unlike(Digits):
    """Whoever has the first sample gives other names than the others: in the loss, or in an evaluation alone."""

    precision: str = "float64"
    first: tuple[str, ...] = ("cls", "box")
    others: tuple[str, ...] = ("cls", "mask")
    measured: bool = False

    def loss(self, output: Tensor, batch: dict[str, Any]) -> Loss:
        alike = self.measured and output.requires_grad
        names = self.first if alike or phalanx.rows(output)[0] == 0 else self.others
        found = {
            name: Loss(output.square().sum(), len(output) * (1 + i * (not self.measured)))
            for i, name in enumerate(names)
        }
        return phalanx.losses.sum(**found) if found else Loss(output.square().sum(), len(output))


@pytest.mark.parametrize("layout", ["dp=2", "fsdp=2,micro_batch=2", "dp=2,exact=2"])
@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("others", [("cls", "mask"), ("cls",), ("box", "cls"), ()])
def test_names_that_differ_between_ranks_are_refused_by_all(
    ranks: Ranks, layout: str, measured: bool, others: tuple[str, ...]
) -> None:
    told = f"gets cls, box on some ranks and {', '.join(others) or 'nothing'} on others. .*a count of 0"
    with pytest.raises(RankFailed, match=told) as failed:
        ranks(2, named, Unlike(others=others, measured=measured, steps=2), layout)
    assert str(failed.value).count("WrongUse: ") == 2


@pytest.mark.parametrize("others", [("cls", "mask"), ("cls",), ("box", "cls"), ()])
@pytest.mark.parametrize("measured", [False, True])
def test_every_micro_batch_has_every_name(others: tuple[str, ...], measured: bool) -> None:
    with pytest.raises(WrongUse, match=f"gets {', '.join(others) or 'nothing'} here, and got cls, box before"):
        named(Unlike(others=others, measured=measured), "micro_batch=3")


def test_measures_that_are_sums() -> None:
    one, two = Loss(torch.tensor(3.0), 2), Loss(torch.tensor(1.0), 4)
    keys = spelled_out("loss", phalanx.losses.sum(a=one, b=two))
    assert len(keys) == 3
    means = {key: float(loss.total / loss.count) for key, loss in keys.items()}
    assert added_up({"top/1": 0.5, **means}) == {"top/1": 0.5, "loss": 1.75, "loss/a": 1.5, "loss/b": 0.25}
    assert math.isnan(added_up(dict.fromkeys(keys, math.nan))["loss"])


def test_the_screen_and_the_events_have_them(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("from tests.train.test_totals import Several\nclass Mine(Several):\n    pass\n")
    done = command("train", "task.py", "--steps", "3", "--layout", "micro_batch=2", "--run", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "each goes through the model twice" in done.stdout
    lines = (tmp_path / "run" / "events" / "rank-00000.jsonl").read_text().splitlines()
    steps = [event for event in map(json.loads, lines) if event["kind"] == "step"]
    assert all(set(step["losses"]) == {"size", "large"} for step in steps)
