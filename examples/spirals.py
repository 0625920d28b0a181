from dataclasses import dataclass

import torch
from torch import nn

import phalanx


@dataclass
class Spirals(phalanx.Task):
    """Which of three spiral arms does a point lie on?"""

    width: int = 64  # every field can be set: --set width=128
    global_batch: int = 60
    steps: int = 300
    learning_rate: float = 1e-2

    def model(self):
        hidden = [nn.Linear(2, self.width), nn.ReLU(), nn.Linear(self.width, self.width), nn.ReLU()]
        return nn.Sequential(*hidden, nn.Linear(self.width, 3))

    def data(self):
        arm, radius = torch.arange(3000) % 3, torch.linspace(0.1, 1, 3000)
        angle = 5 * radius + 2.1 * arm + 0.1 * torch.randn(3000)
        return phalanx.data.Arrays(x=torch.stack([radius * angle.cos(), radius * angle.sin()], 1), y=arm)

    def inputs(self, batch):
        return batch["x"]

    def loss(self, output, batch):
        return phalanx.losses.cross_entropy(output, batch["y"])
