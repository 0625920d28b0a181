"""A step's one small sum: all ranks hold the same, and a weight that no rank used is known to all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx.train.step_agreement import agree, nobody_touched
from phalanx.train.totals import Totals
from tests.ranks import Ranks


class Halves(nn.Module):
    """Which of its weights are used depends on the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = (nn.Parameter(torch.ones(3) * n) for n in (1, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, :3] * (self.left if float(x[0, 3]) < 2 else self.right)).sum(1)


@dataclass
class Sided(phalanx.Task):
    global_batch: int = 4

    def model(self) -> nn.Module:
        return Halves()

    def data(self) -> Any:
        x = torch.cat([torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.arange(4.0)[:, None]], 1)
        return phalanx.data.Arrays(x=x)

    def inputs(self, batch: Any) -> Any:
        return batch["x"]

    def loss(self, output: Tensor, batch: Any) -> phalanx.Loss:
        return phalanx.Loss(output.square().sum(), len(output))


def step(layout: str) -> tuple[Any, ...]:
    with phalanx.Engine(Sided(), layout, device="cpu") as engine:
        batch = next(engine.batches())
        engine.spread.train()
        engine.clock.start("forward")
        totals: Totals = engine.graphs(batch)
        engine.spread.complete_gradients()
        held = agree(engine, 0, totals.table())
        return held.total, held.count, held.norm, held.missing, held.alike, sorted(nobody_touched(engine))


def test_all_ranks_hold_the_same(ranks: Ranks) -> None:
    (alone,) = ranks(1, step, "dp=1,micro_batch=1")
    found = ranks(2, step, "dp=2,micro_batch=1")
    assert found[0] == found[1]
    assert found[0][:3] == pytest.approx(alone[:3], rel=1e-6)
    assert found[0][1] == 4
    assert found[0][3] >= 2, "each rank is without one weight at least"
    assert found[0][4:] == (True, ["never"])
    assert alone[5] == ["never"]


def test_exact_sums_agree_to_the_same_bits(ranks: Ranks) -> None:
    (alone,) = ranks(1, step, "dp=1,exact=4")
    found = ranks(2, step, "dp=2,exact=4")
    assert found[0][:3] == found[1][:3] == alone[:3]
