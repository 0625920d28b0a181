"""One-bit Adam's update: when it begins, what it is by, and which optimizers it is for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import phalanx
from phalanx.errors import WrongUse
from phalanx.train.checkpointing import save
from phalanx.train.restoring import load
from tests.ranks import Ranks
from tests.tasks import Digits


@dataclass
class Chosen(Digits):
    """Digits with an optimizer by name."""

    kind: str = "AdamW"
    width: int = 64
    steps: int = 10

    def optimizer(self, params: Any) -> Any:
        made = {
            "AdamW": lambda: optim.AdamW(params, lr=1e-2, fused=True),
            "Adam": lambda: optim.Adam(params, lr=1e-2, betas=(0.8, 0.99)),
            "ours": lambda: phalanx.optim.AdamW(params, lr=1e-2, moments="float32"),
            "narrow": lambda: phalanx.optim.AdamW(params, lr=1e-2),
            "decay": lambda: optim.Adam(params, lr=1e-2, weight_decay=0.1),
            "amsgrad": lambda: optim.AdamW(params, lr=1e-2, amsgrad=True),
            "SGD": lambda: optim.SGD(params, lr=1e-2),
            "groups": lambda: optim.AdamW([
                {"params": params[:2], "betas": (0.5, 0.9)}, {"params": params[2:], "lr": 1e-3},
            ], lr=1e-2),
            "several": lambda: {"first": optim.AdamW(params[:2], lr=1e-2), "second": optim.Adam(params[2:], lr=1e-2)},
        }  # fmt: skip
        return made[self.kind]()


def variances(kind: str, fp16: bool = False) -> tuple[list[dict[str, torch.Tensor]], list[float]]:
    """After each step."""
    task = Chosen(kind=kind, precision="fp16" if fp16 else "fp32")
    with phalanx.Engine(task, "dp=2,comm=onebit", device="cpu") as engine:
        found, losses = [], []
        for batch in engine.batches():
            losses.append(engine.step(batch).loss)
            state = engine.optimizer.state
            found.append({n: state[w.shard]["exp_avg_sq"].clone() for n, w in engine.spread.weights.items()})
        return found, losses


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "ours", "groups", "several"])
def test_the_variance_stays_from_some_step_on(ranks: Ranks, kind: str) -> None:
    found, losses = ranks(2, variances, kind)[0]
    for name in found[0]:
        assert not torch.equal(found[0][name], found[1][name])
        assert all(torch.equal(later[name], found[2][name]) for later in found[3:])
        assert found[-1][name].min() >= 0.049 * found[-1][name].mean()
    assert losses[-1] < 0.9 * losses[0]


def left_as_it_was() -> bool:
    with phalanx.Engine(Chosen(), "dp=2,comm=onebit", device="cpu") as engine:
        first, second, freezes = (batch for _, batch in zip(range(3), engine.batches(), strict=False))
        engine.step(first)
        engine.step(second)
        kept = [state["exp_avg_sq"] for state in engine.optimizer.state.values()]
        before = [variance.clone() for variance in kept]
        engine.step(freezes)
        assert "frozen" in engine.optimizer.param_groups[0]
        assert not any(
            state["exp_avg_sq"] is old for state, old in zip(engine.optimizer.state.values(), kept, strict=True)
        )
        return all(map(torch.equal, before, kept))


def test_what_may_be_being_copied_is_left_as_it_is(ranks: Ranks) -> None:
    assert ranks(2, left_as_it_was) == [True, True]


def test_a_loss_that_is_scaled_makes_no_difference(ranks: Ranks) -> None:
    (_, scaled), (_, plain) = (ranks(2, variances, "AdamW", fp16)[0] for fp16 in (True, False))
    assert scaled == pytest.approx(plain, rel=0.1)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("SGD", "sends the momentum of Adam, and the optimizer is SGD"),
        ("narrow", "moments=bfloat16 would round it again"),
        ("decay", "Adam adds weight_decay=0.1 to them. Use AdamW"),
        ("amsgrad", "is not offered with amsgrad of AdamW"),
    ],
)
def test_others_are_refused_by_name(ranks: Ranks, kind: str, why: str) -> None:
    assert why in ranks(2, refused, kind)[0]


def refused(kind: str) -> str:
    with pytest.raises(WrongUse) as told:
        phalanx.Engine(Chosen(kind=kind), "dp=2,comm=onebit", device="cpu")
    return str(told.value)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x) + 0 * self.unused(x)


class WithUnused(Digits):
    def model(self) -> nn.Module:
        return Unused()


def stopped() -> str:
    with phalanx.Engine(WithUnused(), "dp=2,comm=onebit", device="cpu") as engine:
        *first, last = (batch for _, batch in zip(range(3), engine.batches(), strict=False))
        for batch in first:
            engine.step(batch)
        with pytest.raises(WrongUse) as told:
            engine.step(last)
    return str(told.value)


def test_a_weight_without_a_variance_is_said(ranks: Ranks) -> None:
    assert "after 2 steps, in which unused.weight had none" in ranks(2, stopped)[0]


def run(layout: str, folder: str, half: int, onward: bool) -> tuple[list[float], list[str], Any]:
    with phalanx.Engine(Chosen(), layout, device="cpu") as engine:
        if onward:
            load(engine, folder)
        losses = []
        for batch in engine.batches():
            if engine.step_number == half and not onward:
                save(engine, folder)
            losses.append(engine.step(batch).loss)
        return losses, engine.changes, engine.optimizer.param_groups[0].get("frozen")


@pytest.mark.parametrize("half", [1, 2, 5])
def test_a_run_goes_on_to_the_same_bits_in_either_phase(ranks: Ranks, tmp_path: Path, half: int) -> None:
    losses, *_ = ranks(2, run, "dp=2,comm=onebit", str(tmp_path), half, False)[0]
    again, _, frozen = ranks(2, run, "dp=2,comm=onebit", str(tmp_path), half, True)[0]
    assert again == losses[half:]
    assert frozen == 2


def test_another_number_of_ranks_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    losses, *_ = ranks(2, run, "dp=2,comm=onebit", str(tmp_path), 5, False)[0]
    for layout in ("dp=3,comm=onebit", "dp=2,fsdp=2,comm=onebit"):
        again, changes, frozen = ranks(phalanx.Layout.parse(layout).world, run, layout, str(tmp_path), 5, True)[0]
        assert again[0] == pytest.approx(losses[5], rel=1e-5)
        assert again[-1] == pytest.approx(losses[-1], rel=0.5)
        assert frozen == 2
        assert not changes


def test_without_it_the_variance_moves_again(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, run, "dp=2,comm=onebit", str(tmp_path), 5, False)
    _, changes, frozen = ranks(2, run, "dp=2", str(tmp_path), 5, True)[0]
    assert frozen is None
    assert "comm was onebit and is exact: the variance of gradients is not frozen any more" in changes
