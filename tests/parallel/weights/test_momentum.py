from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import phalanx
from phalanx.parallel.weights.momentum import Momentum
from tests.parallel.weights.test_coded import train
from tests.ranks import Ranks
from tests.tasks import Digits


class Named:
    """As much of a weight as is asked for."""

    def __init__(self, name: str) -> None:
        self.name = name


def test_what_all_say_is_the_new_momentum() -> None:
    momentum, gradients = Momentum(), torch.randn(3, 5, dtype=torch.float64)
    before, weight = torch.randn(5, dtype=torch.float64), Named("w")
    momentum.of, momentum.divisor = {"w": (before, 0.9)}, 12.0
    for own in gradients:
        momentum.add([(weight, own)], 1 / 3)  # type: ignore[list-item]
    total = gradients.sum(0)
    momentum.become([(weight, total)])  # type: ignore[list-item]
    said = gradients - 0.9 / 0.1 * 12 / 3 * before
    assert torch.allclose(total / 12, 0.9 * before + 0.1 * said.sum(0) / 12)


def test_a_weight_that_nobody_updates_is_left_alone() -> None:
    own = torch.ones(2)
    Momentum().add([(Named("w"), own)], 1.0)  # type: ignore[list-item]
    Momentum().become([(Named("w"), own)])  # type: ignore[list-item]
    assert own.tolist() == [1, 1]


@pytest.mark.parametrize("layout", ["dp=4,comm=onebit", "dp=4,comm=onebit:30"])
def test_every_rank_goes_the_same_way(ranks: Ranks, layout: str) -> None:
    found = ranks(4, train, layout)
    ((right, *_),) = ranks(1, train, "dp=1")
    assert all(other[0] == found[0][0] and other[2] == found[0][2] for other in found)
    exact = 1 + math.ceil(8 * (0.3 if layout.endswith("30") else 0.2))
    assert found[0][0][:exact] == pytest.approx(right[:exact], rel=1e-5)
    assert found[0][0][exact:] != pytest.approx(right[exact:], rel=1e-5)
    assert found[0][0][-1] < 0.6 * right[0]


def sent(layout: str) -> list[int]:
    """Bytes of each step."""

    class Wide(Digits):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(4, 4096), nn.ReLU(), nn.Linear(4096, 3))

    with phalanx.Engine(Wide(steps=5), layout, device="cpu") as engine:
        return [sum(engine.step(batch).sent.values()) for batch in engine.batches()]


def test_bytes_are_those_of_signs(ranks: Ranks) -> None:
    coded, exact = (ranks(2, sent, layout)[0] for layout in ("dp=2,comm=onebit", "dp=2"))
    assert coded[0] == pytest.approx(exact[0], rel=0.1)
    assert exact[-1] / coded[-1] > 25


def test_a_step_that_is_not_finite_spoils_nothing(ranks: Ranks) -> None:
    losses, _, _, finite = ranks(2, train, "dp=2,comm=onebit", 3)[0]
    assert finite
    assert any(map(math.isnan, losses))
    assert not math.isnan(losses[-1])
