"""The task: defaults that work, and refusals that say what to define."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from phalanx import Loss, Task, WrongUse
from phalanx.task import as_loss


@dataclass
class Bare(Task):
    pass


@pytest.mark.parametrize("method", ["model", "data"])
def test_what_is_missing_is_named(method: str) -> None:
    with pytest.raises(WrongUse, match=rf"Bare has no {method}\(\)"):
        getattr(Bare(), method)()


def test_the_schedule_warms_up_and_falls_to_a_tenth() -> None:
    factor = Bare(steps=100, warmup_steps=10).schedule()
    assert factor(0) == pytest.approx(0.1)
    assert factor(9) == pytest.approx(1.0)
    assert factor(99) == pytest.approx(0.1, abs=0.01)
    assert all(factor(step) >= factor(step + 1) for step in range(10, 99))
    assert math.isfinite(Bare(steps=3, warmup_steps=0).schedule()(50))


def test_only_matrices_are_decayed() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    groups = Bare(weight_decay=0.5).optimizer(list(model.parameters())).param_groups
    assert {(p.ndim, group["weight_decay"]) for group in groups for p in group["params"]} == {(2, 0.5), (1, 0.0)}


@pytest.mark.parametrize(
    ("field", "value"),
    [("global_batch", 0), ("steps", -1), ("clip", 0.0), ("precision", "fp4"), ("workers", -2), ("warmup_steps", -1)],
)
def test_settings_that_cannot_work_are_refused(field: str, value: object) -> None:
    with pytest.raises(WrongUse, match=field):
        Bare(**{field: value}).check()


@pytest.mark.parametrize(
    "loss",
    [
        torch.zeros(()),
        3.0,
        Loss(torch.zeros(())),
        Loss(torch.zeros(3), 3),
        Loss(3.0, 1),
        Loss(torch.zeros(()), torch.ones(2)),
        None,
    ],
)
def test_a_loss_that_is_not_a_sum_and_a_count_is_refused(loss: object) -> None:
    with pytest.raises(WrongUse, match=r"Return phalanx.Loss\(total, count\)"):
        as_loss(loss, Bare())


def test_samples_that_do_not_stack_are_refused() -> None:
    with pytest.raises(WrongUse, match=r"collate\(samples\)"):
        Bare().collate([{"x": torch.zeros(2)}, {"x": torch.zeros(3)}])
    assert Bare().collate([{"x": 1, "y": 2.0}, {"x": 3, "y": 4.0}])["x"].tolist() == [1, 3]
