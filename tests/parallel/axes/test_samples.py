"""Losses that compare samples: equal to one device under every layout, tensor by tensor, or refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx import Layout, Loss, WrongUse, gathering
from phalanx.references import find_task
from tests.comparing import Contrast, ContrastOfExperts
from tests.parity import TOLERANCE, Trace, difference, reference, spread_run
from tests.ranks import RankFailed, Ranks
from tests.tasks import Digits

EXAMPLE = Path(__file__).parents[3] / "examples" / "contrastive.py"
LAYOUTS = {
    1: ["dp=1", "micro_batch=7", "micro_batch=5,recompute=full"],
    2: [
        "dp=2", "dp=2,micro_batch=5", "fsdp=2", "fsdp=2,micro_batch=4,recompute=full", "fsdp=2,zero=2,micro_batch=4",
        "fsdp=2,zero=1", "tp=2,micro_batch=9", "cp=2,micro_batch=9", "cp=2,cp_kind=ulysses,zero=1", "pp=2",
        "pp=2,schedule=zb,recompute=full", "dp=2,exact=2", "dp=2,offload=params,micro_batch=5",
    ],
    4: [
        "dp=4", "dp=4,micro_batch=2", "fsdp=4,micro_batch=3", "dp=2,fsdp=2,zero=2,micro_batch=3", "fsdp=2,tp=2",
        "dp=2,cp=2,micro_batch=6", "fsdp=2,pp=2", "dp=2,pp=2,schedule=gpipe", "fsdp=4,exact=4",
    ],
}  # fmt: skip


def run(task: phalanx.Task, layouts: list[str]) -> list[Trace]:
    return [spread_run(task, Layout.parse(layout)) for layout in layouts]


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.every), 4])
def test_a_contrastive_loss_trains_like_on_one_device(ranks: Ranks, world: int) -> None:
    """Class weights and means of the global batch, a gather of what another gave; the last batch has 2 samples."""
    task = Contrast()
    expected = reference(task)
    for layout, found in zip(LAYOUTS[world], ranks(world, run, task, LAYOUTS[world])[0], strict=True):
        error, where = difference(found, expected)
        assert error < TOLERANCE, (layout, where)


def test_with_experts(ranks: Ranks) -> None:
    task, layouts = ContrastOfExperts(), ["fsdp=2,ep=2", "fsdp=2,ep=2,micro_batch=6,zero=1"]
    expected = reference(task)
    for layout, found in zip(layouts, ranks(2, run, task, layouts)[0], strict=True):
        error, where = difference(found, expected)
        assert error < TOLERANCE, (layout, where)


class Apart(Contrast):
    """Every rank compares its own samples alone."""

    def loss(self, output: Any, batch: dict[str, Tensor]) -> Loss:
        with gathering.answered_by(None):
            return super().loss(output, batch)


def test_the_loss_is_another_within_each_ranks_batch(ranks: Ranks) -> None:
    """So that the comparison above can fail."""
    found = ranks(2, run, Apart(), ["dp=2"])[0][0]
    assert difference(found, reference(Contrast()))[0] > 1e-3


@dataclass
class Points(Digits):
    precision: str = "float64"
    where: str = "loss"
    what: str = "rows"
    counts: str = "own"

    def model(self) -> nn.Module:
        class Asking(nn.Sequential):
            def forward(self, x: Tensor) -> Tensor:
                return phalanx.gather(super().forward(x))[phalanx.rows(x)]

        return (Asking if self.where == "forward" else nn.Sequential)(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def loss(self, output: Tensor, batch: dict[str, Any]) -> Loss:
        asked = {
            "rows": output,
            "no batch": output.sum(),
            "too many": torch.cat([output, output]),
            "a list": [output],
            "unlike": output.new_ones(len(output), 1 + int(output.requires_grad and batch["x"][0, 0] > 0)),
        }[self.what]
        every, own = phalanx.gather(asked), phalanx.rows(output)
        assert torch.equal(every[own], asked)
        return Loss((output - every.mean(0)).square().sum(), len(own))


def train(task: phalanx.Task, layout: str) -> list[dict[str, Any]]:
    with phalanx.Engine(task, Layout.parse(layout), device="cpu") as engine:
        return [vars(engine.step(batch)) for batch in engine.batches()]


@pytest.mark.parametrize(
    ("task", "layout", "told"),
    [
        (Points(where="forward"), "dp=1", "called in the model's forward.*gather it in Task.loss"),
        (Points(what="no batch"), "dp=1", r"a tensor of shape \(\), and this rank has 8 samples"),
        (Points(what="too many"), "micro_batch=2", r"shape \(4, 3\), and this rank has 2 samples"),
        (Points(what="a list"), "dp=1", "got a list"),
        (Points(), "exact=2", "into 2 micro-batches in a pipeline or for exact sums.*leave exact out"),
    ],
)
def test_what_cannot_be_gathered_is_refused(task: Points, layout: str, told: str) -> None:
    with pytest.raises(WrongUse, match=told):
        train(task, layout)


def test_a_pipeline_takes_one_micro_batch(ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match="Give pp one micro-batch"):
        ranks(2, run, Contrast(), ["pp=2,micro_batch=8"])


def test_rows_that_differ_between_ranks_are_refused_by_all(ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match="rows that differ between ranks") as failed:
        ranks(2, train, Points(what="unlike", samples=16, steps=6), "dp=2")
    assert str(failed.value).count("WrongUse: ") == 2


def kinds(layout: str) -> list[Tensor]:
    """What is gathered of every kind of number, for three samples of which one rank may have none."""
    found: list[Tensor] = []

    class Kinds(Points):
        def loss(self, output: Tensor, batch: dict[str, Any]) -> Loss:
            x = batch["x"]
            for value in (x > 0, batch["y"], batch["y"].to(torch.int32), x.to(torch.bfloat16), x.half(), x[:, 0], x):
                found.append(phalanx.gather(value))
            return super().loss(output, batch)

    train(Kinds(samples=8, global_batch=5, steps=2), layout)
    return found[-7:]


def test_every_kind_of_number(ranks: Ranks) -> None:
    expected = kinds("dp=1")
    assert [t.dtype for t in expected[:2]] == [torch.bool, torch.int64]
    for every in ranks(4, kinds, "dp=4"):
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(every, expected, strict=True))


def held_out(task: phalanx.Task, layouts: list[str]) -> list[dict[str, float]]:
    found = []
    for layout in layouts:
        with phalanx.Engine(task, Layout.parse(layout), device="cpu") as engine:
            found.append(engine.evaluate())
    return found


class Measured(Points):
    def evaluate(self, output: Tensor, batch: dict[str, Any]) -> dict[str, Loss]:
        nearest = torch.cdist(output, phalanx.gather(output)).topk(2, largest=False).indices[:, 1]
        return {"loss": self.loss(output, batch), "neighbour": Loss(nearest.sum(), len(nearest))}


def test_evaluation_compares_with_the_whole_batch(ranks: Ranks) -> None:
    """Of 13 samples the second batch has 5."""
    (expected,) = held_out(Measured(), ["dp=1"])
    shared = ranks(2, held_out, Measured(), ["dp=2", "dp=2,micro_batch=3"])
    for found in [held_out(Measured(), ["micro_batch=3"]), *shared]:
        for measures in found:
            assert measures == pytest.approx(expected, rel=1e-9)


def test_a_rank_without_samples_gets_and_gives_nothing(ranks: Ranks) -> None:
    expected = train(Points(samples=9, global_batch=8, steps=2), "dp=1")
    for found in ranks(4, train, Points(samples=9, global_batch=8, steps=2), "fsdp=4"):
        assert np.allclose([m["loss"] for m in found], [m["loss"] for m in expected], rtol=1e-12)
        assert np.allclose([m["grad_norm"] for m in found], [m["grad_norm"] for m in expected], rtol=1e-9, atol=1e-15)


def example(layouts: list[str]) -> list[tuple[dict[str, Tensor], dict[str, float]]]:
    """The example's weights and measures after some steps, of which one is short."""
    task = find_task(str(EXAMPLE))(precision="float64", global_batch=301, steps=8, warmup_steps=0)
    found = []
    for layout in layouts:
        with phalanx.Engine(task, Layout.parse(layout), device="cpu") as engine:
            for batch in engine.batches():
                engine.step(batch)
            found.append(({name: t.clone() for name, t in engine.whole_weights().items()}, engine.evaluate()))
    return found


def test_the_example_is_the_same_at_any_number_of_ranks(ranks: Ranks) -> None:
    ((expected, measures),) = example(["dp=1"])
    shared = {2: ["dp=2", "fsdp=2,micro_batch=40"], 4: ["dp=4", "dp=2,fsdp=2,zero=1,micro_batch=40"]}
    for world, layouts in shared.items():
        for weights, found in ranks(world, example, layouts)[0]:
            assert found == pytest.approx(measures, rel=1e-9)
            assert all(torch.allclose(weights[name], want, rtol=1e-9, atol=1e-12) for name, want in expected.items())


def test_rows_are_the_callers_own() -> None:
    class Adds(Digits):
        def loss(self, output, batch):
            own = phalanx.rows(output)
            own += 100
            return super().loss(output, batch)

    with phalanx.Engine(Adds(steps=1), device="cpu") as engine:
        batch = next(engine.batches())
        slots = batch.micro_batches[0].slots.copy()
        engine.step(batch)
        assert (batch.micro_batches[0].slots == slots).all()
