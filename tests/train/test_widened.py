"""Constants that people write in float32 meet float64 in a proof."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import phalanx
from phalanx.prove.proof import prove
from phalanx.train.widened import Float64, Widened
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


def test_what_is_narrow_by_default_or_by_a_cast_is_wide() -> None:
    whole, wide = torch.arange(3), torch.ones(3, dtype=torch.float64)
    with Float64() as mode:
        made = [
            whole.float(), whole / 2, whole + 0.5, torch.zeros(2), torch.tensor(0.5), wide.to(torch.float32),
            wide.half(), wide.type(torch.float32), torch.zeros(2, dtype=torch.float32), whole.sum(dtype=torch.bfloat16),
            F.softmax(wide, 0, dtype=torch.float32), wide.to(torch.ones(1, dtype=torch.float32)),
        ]  # fmt: skip
        assert {tensor.dtype for tensor in made} == {torch.float64}
        assert mode.lifted
        assert torch.zeros(3).index_add_(0, whole, wide).dtype == torch.float64
        assert whole.to(torch.int32).dtype == torch.int32
        assert wide.view(torch.float32).dtype == torch.float32, "of the same bytes"
    assert torch.get_default_dtype() == torch.float32
    assert whole.float().dtype == torch.float32
