import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import phalanx


class Pair(nn.Module):
    def __init__(self, noise, width):
        super().__init__()
        self.generator = network(noise, width, 2)
        self.discriminator = network(2, width, 1)

    def forward(self, noise, real=None, judged=True):
        fake = self.generator(noise)
        if real is not None:  # the discriminator's turn
            return self.discriminator(fake.detach()), self.discriminator(real)
        return self.discriminator(fake) if judged else fake


def network(inputs, width, outputs):
    hidden = [nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()]
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


@dataclass
class GAN(phalanx.Task):
    """Learns to draw points around a circle: a generator draws, a discriminator tells drawn points from real ones."""

    noise: int = 4
    width: int = 64
    global_batch: int = 64
    steps: int = 1500
    learning_rate: float = 2e-3
    clip: float = math.inf

    turns = ("discriminator", "generator")  # one a step; "discriminator" five times would give it five

    def model(self):
        return Pair(self.noise, self.width)

    def ring(self, n, seed):
        angle = 2 * math.pi * torch.rand(n, generator=torch.Generator().manual_seed(seed))
        return phalanx.data.Arrays(point=torch.stack([angle.cos(), angle.sin()], 1))

    def data(self):
        return self.ring(4000, seed=1)

    def held_out(self):
        return self.ring(500, seed=2)

    def inputs(self, batch):
        noise = torch.randn(len(batch["point"]), self.noise)  # keyed by step and sample, whatever the layout
        if batch.turn == "discriminator":
            return {"noise": noise, "real": batch["point"]}
        return {"noise": noise, "judged": batch.turn == "generator"}

    def loss(self, output, batch):
        if batch.turn == "generator":
            return phalanx.Loss(F.softplus(-output).sum(), len(output))
        fake, real = output
        return phalanx.Loss(F.softplus(fake).sum() + F.softplus(-real).sum(), len(fake))

    def optimizer(self, params):
        def own(turn):
            return [p for p in params if p.logical_name.startswith(turn)]

        return {
            "discriminator": torch.optim.Adam(own("discriminator"), lr=self.learning_rate, betas=(0.5, 0.99)),
            "generator": torch.optim.RMSprop(own("generator"), lr=self.learning_rate / 4),
        }

    def schedule(self):
        return {"discriminator": lambda step: 1.0, "generator": lambda step: min(1.0, (step + 1) / 100)}

    def evaluate(self, output, batch):
        return {"drawn": output}

    def summarise(self, gathered):
        x, y = gathered["drawn"].double().T
        around = torch.histc(torch.atan2(y, x), bins=12, min=-math.pi, max=math.pi) / len(x)
        return {"off the circle": (torch.hypot(x, y) - 1).abs().mean(), "emptiest twelfth": around.min()}
