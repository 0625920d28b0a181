"""FLOPs of a model: those of torch's own counter on one device, whatever of it is frozen, and none where unknown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import phalanx
from phalanx.callbacks import Callback, Freeze
from phalanx.train.model_flops import flops_per_sample, model_flops
from tests.tasks import Digits


def by_torch(task: phalanx.Task, samples: int = 2) -> float:
    data = task.data()
    batch = task.collate([data[index] for index in range(samples)])
    with FlopCounterMode(display=False) as counter:
        task.loss(task.model()(task.inputs(batch)), batch).total.backward()
    return counter.get_total_flops() / samples


def test_they_are_those_of_one_device() -> None:
    assert flops_per_sample(Digits()) == by_torch(Digits()) > 0


@dataclass
class Frozen(Digits):
    def callbacks(self) -> Sequence[Callback]:
        return [Freeze("0.*")]


def test_frozen_weights_cost_no_gradient() -> None:
    assert 0 < flops_per_sample(Frozen()) < flops_per_sample(Digits())


class Chosen(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[x.sum(1) > 0])


@dataclass
class ByValue(Digits):
    def model(self) -> nn.Module:
        return Chosen(64, 10)


def test_shapes_that_depend_on_values_are_not_counted_and_that_is_said() -> None:
    found = model_flops(ByValue())
    assert not found.a_sample
    assert "could not be counted" in found.why
    with pytest.raises(Exception, match=r"aten\.|nonzero|dynamic"):
        flops_per_sample(ByValue())
