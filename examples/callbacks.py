from dataclasses import dataclass

import torch
from torch import nn

import phalanx


class Plateau(phalanx.Callback):
    """Ends the run when the loss stays within a hundredth of what it was for a hundred steps."""

    def __init__(self):
        self.level, self.since = float("inf"), 0

    def on_step(self, engine, metrics):
        if abs(metrics.loss - self.level) > 0.01:
            self.level, self.since = metrics.loss, metrics.step
        elif metrics.step - self.since >= 100:
            engine.stop(f"the loss has stayed at {self.level:.2f} for 100 steps")

    def state_dict(self):
        return {"level": self.level, "since": self.since}

    def load_state_dict(self, state):
        self.level, self.since = state["level"], state["since"]


@dataclass
class Rings(phalanx.Task):
    """Which of three rings does a point lie on?"""

    width: int = 32
    global_batch: int = 50
    steps: int = 1000
    learning_rate: float = 1e-2
    evaluate_every: int = 20

    def model(self):
        return nn.Sequential(nn.Linear(2, self.width), nn.Tanh(), nn.Linear(self.width, 3))

    def _points(self, many, seed):
        draw = torch.Generator().manual_seed(seed)
        ring = torch.randint(3, (many,), generator=draw)
        points = nn.functional.normalize(torch.randn(many, 2, generator=draw)) * (1 + ring)[:, None]
        return phalanx.data.Arrays(x=points + 0.3 * torch.randn(many, 2, generator=draw), y=ring)

    def data(self):
        return self._points(2000, seed=0)

    def held_out(self):
        return self._points(500, seed=1)

    def inputs(self, batch):
        return batch["x"]

    def loss(self, output, batch):
        return phalanx.losses.cross_entropy(output, batch["y"])

    def callbacks(self):
        return [
            phalanx.Freeze("0.*", until=20),  # the first layer, in the first 20 steps
            phalanx.EMA(decay=0.98, evaluate=True),  # held-out data is evaluated with averaged weights
            phalanx.EarlyStopping("loss", patience=3, min_delta=0.005),
            Plateau(),
        ]
