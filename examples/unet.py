from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

import phalanx


class Block(nn.Module):
    def __init__(self, width_in, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width_in, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU(),
        )  # fmt: skip

    def forward(self, x):
        return self.layers(x)


class UNet(nn.Module):
    """Down to coarse features and up again, with what each level saw on the way handed across."""

    def __init__(self, width, depth):
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.enter = Block(1, width)
        self.down = nn.ModuleList(Block(a, b) for a, b in pairwise(widths))
        self.up = nn.ModuleList(Block(a + b, a) for a, b in reversed(list(pairwise(widths))))
        self.leave = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        seen = [self.enter(x)]
        for block in self.down:
            seen.append(block(nn.functional.max_pool2d(seen[-1], 2)))
        x = seen.pop()
        for block in self.up:
            x = block(torch.cat([nn.functional.interpolate(x, scale_factor=2), seen.pop()], 1))
        return self.leave(x).squeeze(1)


@dataclass
class Cells(phalanx.Task):
    """Which pixels of a noisy picture belong to a cell? A U-Net on pictures that are made here."""

    width: int = 8
    depth: int = 2
    size: int = 32
    pictures: int = 2000
    global_batch: int = 32
    steps: int = 200
    learning_rate: float = 3e-3

    def model(self):
        return UNet(self.width, self.depth)

    def drawn(self, n, seed):
        made = torch.Generator().manual_seed(seed)
        row = torch.arange(self.size).view(1, 1, -1, 1) - self.size * torch.rand(n, 3, 1, 1, generator=made)
        column = torch.arange(self.size).view(1, 1, 1, -1) - self.size * torch.rand(n, 3, 1, 1, generator=made)
        radius = self.size * (0.08 + 0.12 * torch.rand(n, 3, 1, 1, generator=made))
        cell = (row**2 + column**2 < radius**2).any(1).float()
        noise = 0.5 * torch.randn(n, self.size, self.size, generator=made)
        return phalanx.data.Arrays(x=(cell + noise).unsqueeze(1), cell=cell)

    def data(self):
        return self.drawn(self.pictures, seed=1)

    def held_out(self):
        return self.drawn(100, seed=2)

    def inputs(self, batch):
        return batch["x"]

    def loss(self, output, batch):
        return phalanx.losses.binary_cross_entropy(output, batch["cell"])

    def evaluate(self, output, batch):
        found, cell = output > 0, batch["cell"] > 0.5
        both, either = (found & cell).flatten(1).sum(1), (found | cell).flatten(1).sum(1)
        return {"loss": self.loss(output, batch), "both": both, "either": either}

    def summarise(self, gathered):
        return {"iou": gathered["both"].sum() / gathered["either"].sum()}
