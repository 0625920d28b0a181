"""Small tasks that several tests use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import phalanx


class Silent(nn.Linear):
    def forward(self, x: Tensor) -> None:
        super().forward(x)


@dataclass
class Digits(phalanx.Task):
    """Separable points; ``spoil`` poisons one sample, ``mistake`` makes one that people make."""

    global_batch: int = 8
    steps: int = 6
    samples: int = 40
    width: int = 16
    learning_rate: float = 1e-2
    warmup_steps: int = 2
    spoil: int = -1
    mistake: str = ""

    def model(self) -> nn.Module:
        if self.mistake == "no output":
            return Silent(4, 3)
        return nn.Sequential(nn.Linear(4, self.width), nn.ReLU(), nn.Linear(self.width, 3))

    def _points(self, n: int, seed: int) -> phalanx.data.Arrays:
        x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
        y = x[:, :3].argmax(1)
        if 0 <= self.spoil < n:
            x[self.spoil] = float("nan")
        return phalanx.data.Arrays(x=x, y=y)

    def data(self) -> phalanx.data.Arrays:
        return self._points(self.samples, 0)

    def held_out(self) -> Any:
        if self.mistake == "empty":
            return []
        return self._points(13, 1)

    def inputs(self, batch: dict[str, Any]) -> Tensor:
        return batch["x"]

    def loss(self, output: Tensor, batch: dict[str, Any]) -> Any:
        if self.mistake == "a tensor":
            return output.sum()
        if self.mistake == "a number":
            return 3.0
        if self.mistake == "no count":
            return phalanx.Loss(output.sum())
        if self.mistake == "detached" and output.requires_grad:
            output = output.detach()
        if self.mistake == "no column":
            batch["z"]
        if self.mistake == "rank 1 fails":
            assert os.environ["RANK"] != "1"
        return phalanx.losses.cross_entropy(output, batch["y"])

    def evaluate(self, output: Tensor, batch: dict[str, Any]) -> Any:
        if self.mistake == "measure":
            return 0.5
        right = (output.argmax(1) == batch["y"]).sum()
        return {"loss": self.loss(output, batch), "accuracy": phalanx.Loss(right, len(batch["y"]))}
