"""Constants that people write in float32 meet float64 in a proof."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import phalanx
from phalanx.prove.proof import prove
from phalanx.train.widened import Widened
from tests.prove.tasks import Plain

WEIGHTS = torch.tensor([0.2, 0.3, 0.5])


@dataclass
class Weighted(Plain):
    """Constants of a file, and of a loss."""

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        total = F.cross_entropy(output, batch["y"], weight=WEIGHTS, reduction="sum")
        total = total + F.mse_loss(output @ torch.full((3, 2), 0.5), torch.zeros(len(output), 2), reduction="sum")
        return phalanx.Loss(total, len(output))


def test_a_loss_with_constants_is_proven() -> None:
    proof = prove(Weighted(), ["dp=2"])
    assert proof.holds, proof
    assert proof.bar < 1e-10


def test_what_is_written_to_and_what_has_a_gradient_stay_as_they_are() -> None:
    wide, narrow = torch.ones(2, dtype=torch.float64), torch.full((2,), 0.1)
    learned = torch.ones(2, requires_grad=True)
    with Widened():
        assert torch.dot(wide, narrow).dtype == torch.float64
        assert torch.stack([narrow, narrow]).dtype == torch.float32
        assert torch.cat([wide, narrow]).dtype == torch.float64
        narrow.add_(wide)
        assert narrow.dtype == torch.float32
        (wide * learned).sum().backward()
    assert learned.grad is not None
    assert learned.grad.dtype == torch.float32
