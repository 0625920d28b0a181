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
