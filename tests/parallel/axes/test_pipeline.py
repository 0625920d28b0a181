"""Pipelines beside training steps: evaluation, precision, what is refused. (Parity: tests/train.)"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx import Layout
from phalanx.recipes.gpt import GPT
from tests.ranks import RankFailed, Ranks


def small(**options: Any) -> GPT:
    return GPT(width=16, layers=4, heads=2, kv_heads=1, length=16, megabytes=0.1, steps=2, dropout=0.1, **options)


def train(task: phalanx.Task, layout: str) -> tuple[list[float], dict[str, float], dict[str, float]]:
    with phalanx.Engine(task, Layout.parse(layout), device="cpu") as engine:
        metrics = [engine.step(batch) for batch in engine.batches()]
        assert not any(m.skipped for m in metrics)
        return [m.loss for m in metrics], engine.evaluate(), metrics[-1].seconds


@pytest.mark.parametrize("layout", ["pp=4,micro_batch=3", "pp=2,cp=2,schedule=interleaved,micro_batch=5", "tp=2,pp=2"])
def test_evaluation_counts_every_sample_once(ranks: Ranks, layout: str) -> None:
    losses, measures, _ = train(small(precision="float64"), "dp=1")
    for found_losses, found, seconds in ranks(4, train, small(precision="float64"), layout):
        assert found_losses == pytest.approx(losses, rel=1e-12)
        assert found == pytest.approx(measures, rel=1e-12)
        assert "wait" in seconds


@pytest.mark.parametrize(("layout", "precision"), [
    ("fsdp=2,pp=2,micro_batch=2,schedule=zb", "fp16"), ("cp=2,tp=2", "bf16"),
    ("pp=2,schedule=interleaved,fsdp=2,micro_batch=2", "fp16"), ("fsdp=2,cp=2,ep=4,recompute=selective", "bf16"),
    pytest.param("fsdp=2,pp=2,micro_batch=2,schedule=zb", "bf16", marks=pytest.mark.every),
    pytest.param("cp=2,tp=2", "fp16", marks=pytest.mark.every),
    pytest.param("pp=2,schedule=interleaved,fsdp=2,micro_batch=2", "bf16", marks=pytest.mark.every),
    pytest.param("fsdp=2,cp=2,ep=4,recompute=selective", "fp16", marks=pytest.mark.every),
])  # fmt: skip
def test_half_precision_stays_near(ranks: Ranks, layout: str, precision: Any) -> None:
    """Ranks agree to the bit, and with one device to half precision's noise."""
    experts = 4 if "ep" in layout else 0
    losses, _, _ = train(small(precision=precision, experts=experts), "dp=1")
    answers = ranks(4, train, small(precision=precision, experts=experts), layout)
    assert all(answer[0] == answers[0][0] for answer in answers)
    assert answers[0][0] == pytest.approx(losses, rel=2e-3)


def test_offload_and_pipelines(ranks: Ranks) -> None:
    losses, _, _ = train(small(precision="float64"), "dp=1")
    for offload in ("optimizer", "params"):
        layout = f"fsdp=2,pp=2,micro_batch=4,offload={offload}"
        assert ranks(4, train, small(precision="float64"), layout)[0][0] == pytest.approx(losses, rel=1e-12)


class Odd(nn.Module):
    """Blocks in a list, used in one of several ways that a pipeline cannot follow."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.embedding = nn.Linear(4, 6)
        self.early = nn.Linear(6, 6)
        self.several = nn.ModuleList([nn.Linear(6, 6), nn.ModuleDict({"one": nn.Linear(6, 6)})])
        self.blocks = nn.ModuleList(Twice() if way == "two tensors" else Plus() for _ in range(2))
        self.head = nn.Linear(6, 3)
        self.late = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        first, given = self.embedding(x), []
        x = first
        if self.way == "several":
            x = self.several[0](x) + self.several[1]["one"](x)
        if self.way == "late":
            x *= self.late(x)
        if self.way == "in place":
            x *= 2
            x[x.isnan() | (x > 1)] = 0.5
        if self.way == "backwards":
            return self.head(self.blocks[0](self.blocks[1](x)))
        for block in self.blocks:
            x = block(x, first) if self.way == "skip" else block(x, *given)
            x, *given = x if isinstance(x, tuple) else (x,)
        if self.way == "weight":
            x = nn.functional.linear(x, self.early.weight)
        return self.head(self.early(x) if self.way == "early" else x)


class Plus(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        return self.inner(x if other is None else x + other)


class Twice(Plus):
    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        return super().forward(x), x


@dataclass
class OddTask(phalanx.Task):
    way: str = ""
    global_batch: int = 4
    x: Tensor = field(default_factory=lambda: torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))

    def model(self) -> nn.Module:
        return Odd(self.way)

    def data(self) -> phalanx.data.Arrays:
        return phalanx.data.Arrays(x=self.x, y=torch.arange(8) % 3)

    def inputs(self, batch: dict[str, Any]) -> Tensor:
        return batch["x"]

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        return phalanx.losses.cross_entropy(output, batch["y"])


def step(task: phalanx.Task, layout: str) -> float:
    with phalanx.Engine(task, Layout.parse(layout), device="cpu") as engine:
        return engine.step(next(iter(engine.batches()))).loss


@pytest.mark.parametrize(("way", "words"), [
    ("backwards", "blocks.1 is called out of order, so pp=2 cannot cut the model there"),
    ("skip", "blocks.1 is called with a tensor of shape .* that depends on modules before the blocks"),
    ("late", r"that depends on modules registered after the blocks, .* \(called before the blocks: late\)"),
    ("early", "early is used after the blocks and registered before them"),
    ("weight", r"early\.weight is computed with on a stage of pp that does not have it"),
    ("two tensors", "blocks.1 is called with a tensor of shape .* that blocks before it gave beside the stream"),
])  # fmt: skip
def test_models_that_cannot_be_cut_are_refused(ranks: Ranks, way: str, words: str) -> None:
    with pytest.raises(RankFailed, match=words):
        ranks(2, step, OddTask(way=way), "pp=2")
    ranks(2, step, OddTask(), "pp=2")


@pytest.mark.parametrize("way", ["in place", "several"])
def test_what_stands_before_the_blocks_may_be_written_to_and_stand_in_lists(ranks: Ranks, way: str) -> None:
    task = OddTask(way=way, precision="float64")
    assert ranks(2, step, task, "pp=2") == [pytest.approx(step(task, "dp=1"), rel=1e-9)] * 2


@dataclass
class NoBlocks(OddTask):
    def model(self) -> nn.Module:
        return nn.Linear(4, 3)


def test_a_model_without_blocks_is_refused(ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match="pp=2 needs a model whose blocks follow each other in one list"):
        ranks(2, step, NoBlocks(), "pp=2")
