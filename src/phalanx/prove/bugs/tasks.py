"""Tasks in which known bugs show that no recipe can have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import phalanx

SIZE = 8


@dataclass
class Overlap(phalanx.Task):
    """Mark what is bright in an image: a batch Dice loss, one overlap of all samples of a step."""

    samples: int = 64
    global_batch: int = 16

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 1, 1), nn.Flatten(), nn.Sigmoid()
        )

    def data(self) -> Any:
        images = torch.randn(self.samples, 1, SIZE, SIZE)
        return phalanx.data.Arrays(image=images, mask=(images.flatten(1) > 0).float())

    def inputs(self, batch: dict[str, Any]) -> Tensor:
        return batch["image"]

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        found, wanted = phalanx.gather(output), phalanx.gather(batch["mask"])
        overlap = (2 * (found * wanted).sum() + 1) / (found.sum() + wanted.sum() + 1)
        return phalanx.Loss((1 - overlap) * len(output), len(output))


class RecomputedLayer(nn.Module):
    """A layer with dropout that is recomputed in backward by a checkpoint of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(SIZE, 2 * SIZE), nn.Dropout(0.3), nn.Tanh(), nn.Linear(2 * SIZE, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)


@dataclass
class Recomputing(phalanx.Task):
    """Points to classes, by layers that are checkpointed."""

    samples: int = 64
    global_batch: int = 16

    def model(self) -> nn.Module:
        return nn.Sequential(RecomputedLayer(), RecomputedLayer(), nn.Linear(SIZE, 3))

    def data(self) -> Any:
        points = torch.randn(self.samples, SIZE)
        return phalanx.data.Arrays(x=points, y=points[:, :3].argmax(1))

    def inputs(self, batch: dict[str, Any]) -> Tensor:
        return batch["x"]

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        return phalanx.losses.cross_entropy(output, batch["y"])
