from dataclasses import dataclass

import torch
from torch import nn

import phalanx


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Network(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.enter = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.leave = nn.Linear(width, 1)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x).squeeze(1)


@dataclass
class Detector(phalanx.Task):
    """Is a reading faulty? About one in eight is, so accuracy would say little: AUC and F1 do."""

    width: int = 32
    depth: int = 4
    global_batch: int = 50
    steps: int = 200
    learning_rate: float = 3e-3

    def model(self):
        return Network(self.width, self.depth)

    def readings(self, n, seed):
        x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
        faulty = x[:, 0] * x[:, 1] + 0.5 * x[:, 2] ** 2 > 1.4
        return phalanx.data.Arrays(x=x, faulty=faulty.float())

    def data(self):
        return self.readings(4000, seed=1)

    def held_out(self):
        return self.readings(507, seed=2)

    def inputs(self, batch):
        return batch["x"]

    def loss(self, output, batch):
        return phalanx.losses.binary_cross_entropy(output, batch["faulty"])

    def evaluate(self, output, batch):
        # a Loss is summed over all samples; a tensor with a row a sample is gathered for summarise
        return {"loss": self.loss(output, batch), "score": output, "faulty": batch["faulty"]}

    def summarise(self, gathered):
        faulty = gathered["faulty"] > 0.5
        return {"auc": auc(gathered["score"], faulty), "f1": f1(gathered["score"] > 0, faulty)}


def auc(score, positive):
    """How often a positive has a higher score than a negative; half, where they have the same."""
    above = score[positive].unsqueeze(1) - score[~positive]
    return ((above > 0).double() + 0.5 * (above == 0)).mean()


def f1(found, positive):
    return 2 * (found & positive).sum() / (found.sum() + positive.sum()).clamp_min(1)
