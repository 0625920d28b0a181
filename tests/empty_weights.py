"""A model with a weight and a buffer without elements, as some models have by their settings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.tasks import Digits


class Nothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.registers = nn.Parameter(torch.zeros(1, 0, 4))
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.registers.sum(1).expand(len(x), -1)[:, :0]], 1)


class WithNothing(Digits):
    def model(self) -> nn.Module:
        return nn.Sequential(Nothing(), super().model())
