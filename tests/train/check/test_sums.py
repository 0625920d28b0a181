"""Where parts of a batch need not add up to the whole: the task has asked for all samples, or gives losses by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

import phalanx
from phalanx.train.check.beside import checked
from tests.mistakes import Points


@dataclass
class Gathered(Points):
    """A contrastive loss as it should be; ``several`` losses, each with a count of its own."""

    several: bool = False

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        if self.several:
            one = phalanx.Loss(output.square().sum(), 2 * len(output))
            return phalanx.losses.sum(one=one, other=phalanx.losses.cross_entropy(output, batch["y"]))
        every = phalanx.gather(F.normalize(output, dim=1))
        rows = phalanx.rows(output)
        return phalanx.Loss(F.cross_entropy(every[rows] @ every.T, rows, reduction="sum"), len(rows))


@pytest.mark.parametrize("several", [False, True])
def test_a_loss_that_asks_for_all_samples_is_no_sum(several: bool) -> None:
    found = checked(Gathered(several=several))
    assert (found.refusal, found.warnings, found.left_out) == ("", [], "")


@dataclass
class Parts(Points):
    """What only looks like a mean: totals that are all negative, samples that weigh nothing."""

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        weights = (batch["y"] > 0).to(output)
        return phalanx.Loss((output.log_softmax(1)[:, 0] * weights).sum(), weights.sum())


def test_weighted_sums_are_sums() -> None:
    assert checked(Parts()).refusal == ""


@dataclass
class Changing(Points):
    """Losses whose names depend on how many samples are together, in the loss and in the evaluation."""

    changes: bool = True

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        name = "many" if self.changes and len(output) > 5 else "other"
        one = phalanx.Loss(output.square().sum(), 2 * len(output))
        return phalanx.losses.sum(one=one, **{name: phalanx.losses.cross_entropy(output, batch["y"])})

    def evaluate(self, output: Tensor, batch: dict[str, Any]) -> dict[str, phalanx.Loss]:
        return {"loss": self.loss(output, batch)}


def test_a_sum_has_the_same_names_whatever_is_together() -> None:
    assert checked(Changing(changes=False)).refusal == ""
    assert "gets one, many for a batch and one, other for some of it. Give it every name" in checked(Changing()).refusal
