"""Divisions by sums of what a model predicts, and others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import phalanx
from phalanx.train.check.beside import checked
from tests.mistakes import Points

Written = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Dividing(Points):
    """A loss that mixes samples, in one way of many."""

    def written(self, output: Tensor, y: Tensor) -> Tensor:
        return DIVIDING["iou"](output, y)

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        return phalanx.Loss(self.written(output, batch["y"]), len(output))


def one_hot(output: Tensor, y: Tensor) -> Tensor:
    return F.one_hot(y, 3).to(output)


DIVIDING: dict[str, Written] = {
    "iou": lambda x, y: 1 - torch.div((x.sigmoid() * one_hot(x, y)).sum(), (x.sigmoid() + one_hot(x, y)).sum()),
    "tversky": lambda x, y: (1 - (x.sigmoid() * one_hot(x, y)).sum(0) / (x.sigmoid().sum(0) + 1)).mean(),
    "reciprocal": lambda x, y: 3 / x.square().sum(),
}
NOT_DIVIDING: dict[str, Written] = {
    "normalised": lambda x, y: (F.normalize(x, dim=1) @ F.normalize(x, dim=1).T).square().sum(),
    "by rows": lambda x, y: ((x - x.mean(0)) / x.square().sum(1, keepdim=True)).sum(),
    "weighted mean": lambda x, y: (x[:, 0] * y).sum() / (y + 1).sum(),
    "centred": lambda x, y: ((x - x.mean(0)) / x.std(0)).exp().sum(),
}


@pytest.mark.parametrize("way", [*DIVIDING, *NOT_DIVIDING])
def test_what_is_told_of_a_division(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = (DIVIDING | NOT_DIVIDING)[way]
    monkeypatch.setattr(Dividing, "written", lambda self, output, y: written(output, y))
    said = checked(Dividing()).refusal
    assert said
    assert ("divides by a sum over the batch of what the model predicts" in said) == (way in DIVIDING)
