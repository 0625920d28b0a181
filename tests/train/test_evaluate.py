"""Evaluation counts every held-out sample once, at any world size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import phalanx
from phalanx import Layout
from tests.ranks import Ranks
from tests.tasks import Digits


def measure(layout: str, batch: int) -> dict[str, float]:
    with phalanx.Engine(
        Digits(precision="float64", global_batch=batch, steps=2), Layout.parse(layout), device="cpu"
    ) as engine:
        before = engine.evaluate()
        for step in engine.batches():
            engine.step(step)
        after = engine.evaluate()
        assert engine.spread.model.training
        return {f"{name} before": value for name, value in before.items()} | after


def test_thirteen_samples_at_every_world_size(ranks: Ranks) -> None:
    expected = measure("dp=1", 8)
    task = Digits(precision="float64", steps=2)
    held = task.held_out()
    assert expected["accuracy"] * len(held) == pytest.approx(round(expected["accuracy"] * len(held)))
    for world, layout in ((2, "fsdp=2"), (4, "dp=2,fsdp=2,micro_batch=1"), (8, "dp=8"), (8, "fsdp=8,zero=1")):
        found = ranks(world, measure, layout, 8)
        assert all(answer == found[0] for answer in found)
        for name, value in expected.items():
            assert found[0][name] == pytest.approx(value, rel=1e-9), (layout, name)


def test_without_held_out_data_it_says_so() -> None:
    class Nothing(Digits):
        def held_out(self):
            return None

    with phalanx.Engine(Nothing(), device="cpu") as engine, pytest.raises(phalanx.WrongUse, match=r"held_out\(\)"):
        engine.evaluate()


def test_a_measure_without_a_count_is_refused() -> None:
    class Careless(Digits):
        def evaluate(self, output, batch):
            return {"accuracy": torch.tensor(1.0)}

    with (
        phalanx.Engine(Careless(), device="cpu") as engine,
        pytest.raises(phalanx.WrongUse, match=r"for 'accuracy' a tensor of shape \(\) for 8 samples"),
    ):
        engine.evaluate()


class OfClasses(Digits):
    """A measure for each class that is in the batch."""

    def evaluate(self, output: Any, batch: dict[str, Any]) -> Any:
        found = {}
        for label in batch["y"].unique().tolist():
            asked = batch["y"] == label
            found[f"class {label}"] = phalanx.Loss((asked * (output.argmax(-1) + label)).sum(), asked.sum())
        return found


def by_class(layout: str) -> dict[str, float]:
    with phalanx.Engine(OfClasses(precision="float64"), Layout.parse(layout), device="cpu") as engine:
        return engine.evaluate()


def test_measures_that_only_some_ranks_have_are_kept_apart(ranks: Ranks) -> None:
    expected = by_class("dp=1")
    assert len(expected) > 2
    for world, layout in ((4, "dp=4,micro_batch=1"), (2, "pp=2"), (4, "fsdp=4")):
        assert ranks(world, by_class, layout) == [pytest.approx(expected)] * world
