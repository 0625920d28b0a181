"""A small residual network that tells shapes apart: images drawn as they are asked for, nothing to download."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import phalanx
from phalanx.models.resnet import ResNet

KINDS = ("disc", "square", "cross", "stripes", "rings")


class Drawings:
    """Noisy drawings of a shape anywhere in a square; ``first`` numbers them, so that two sets can differ."""

    def __init__(self, count: int, size: int, first: int = 0) -> None:
        self.count, self.size, self.first = count, size, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        source = np.random.default_rng(self.first + index)
        label = int(source.integers(len(KINDS)))
        row, column = np.mgrid[: self.size, : self.size] / self.size - source.uniform(0.35, 0.65, size=(2, 1, 1))
        radius, distance = source.uniform(0.2, 0.3), np.hypot(row, column)
        shape = [
            distance < radius,
            np.maximum(abs(row), abs(column)) < radius,
            np.minimum(abs(row), abs(column)) < radius / 4,
            np.sin(row * 12 / radius) > 0,
            np.sin(distance * 12 / radius) > 0,
        ][label]
        image = shape * source.uniform(0.5, 1, size=(3, 1, 1)) + source.normal(0, 0.2, size=(3, self.size, self.size))
        return {"image": torch.from_numpy(image.astype(np.float32)), "label": label}


@dataclass
class Shapes(phalanx.Task):
    """Tell a disc from a square, a cross, stripes and rings."""

    samples: int = 2000
    size: int = 16
    width: int = 16
    depth: int = 2
    global_batch: int = 32
    steps: int = 100
    learning_rate: float = 3e-3

    def model(self) -> nn.Module:
        return ResNet(classes=len(KINDS), widths=(self.width, 2 * self.width), depth=self.depth)

    def data(self) -> Drawings:
        return Drawings(self.samples, self.size)

    def held_out(self) -> Drawings:
        return Drawings(200, self.size, first=self.samples)

    def inputs(self, batch: dict[str, Any]) -> Tensor:
        return batch["image"]

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        return phalanx.losses.cross_entropy(output, batch["label"])

    def evaluate(self, output: Tensor, batch: dict[str, Any]) -> dict[str, Any]:
        guess, label = output.argmax(1), batch["label"]
        accuracy = phalanx.Loss((guess == label).sum(), len(output))
        return {"loss": self.loss(output, batch), "accuracy": accuracy, "guess": guess, "label": label}

    def summarise(self, gathered: dict[str, Any]) -> dict[str, float]:
        """F1, averaged over the kinds of shapes."""
        guess, label = (torch.nn.functional.one_hot(gathered[name], len(KINDS)).double() for name in ("guess", "label"))
        return {"f1": float((2 * (guess * label).sum(0) / (guess + label).sum(0).clamp_min(1)).mean())}

    def tiny(self) -> Shapes:
        return dataclasses.replace(self, size=6, width=5, depth=1, samples=100)
