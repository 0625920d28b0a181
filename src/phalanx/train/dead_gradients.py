"""Weights that learn nothing: whose gradients, summed over all ranks, are zeros in step after step.

Looked at in some steps in a row, now and then: a norm of each gradient, and one small sum after a few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from phalanx.callbacks import Callback
from phalanx.parallel.torch_private import norms
from phalanx.train.checkpointing import Note
from phalanx.train.step_agreement import summed_over_ranks

if TYPE_CHECKING:
    from phalanx.train.engine import Engine

EVERY = 500
"""Steps from one look to the next."""
JUDGED = (8, 16, 32)
"""After so many steps of a look; the last ends it."""
LEAST = 6
"""In so many of them a weight must have had a gradient, on some rank."""


class DeadGradients(Callback):
    """Notes weights whose gradients are all zeros, and when there are none any more."""

    def __init__(self, engine: Engine, note: Note) -> None:
        self.names = [name for name, trained in engine.spread.trainable.items() if trained]
        self._place = {name: place for place, name in enumerate(self.names)}
        self._note, self._noted = note, list[str]()
        self._begin(engine)

    def _begin(self, engine: Engine) -> None:
        """A look begins: by weight, how often it was not zero, and how often this rank had a part in it."""
        self._steps = 0
        self._counts = torch.zeros(2, len(self.names), dtype=torch.float64, device=engine.device)

    def on_gradients(self, engine: Engine, divisor: float, without: set[str]) -> None:
        """All ranks come here in the same steps."""
        if engine.step_number % EVERY >= JUDGED[-1]:
            return
        if engine.step_number % EVERY == 0:
            self._begin(engine)
        self._steps += 1
        own = [(weight.name, gradient) for weight, gradient in engine.spread.gradients.each() if gradient.numel()]
        if own:
            places = torch.tensor([self._place[name] for name, _ in own], device=engine.device)
            found = norms([gradient for _, gradient in own], engine.spread.gradients.like.dtype)
            self._counts[0].index_add_(0, places, (found != 0).double().to(engine.device))
        touched = [self._place[name] for name in engine.spread.reduction.touched if name in self._place]
        if touched:
            self._counts[1, torch.tensor(touched, device=engine.device)] += 1
        if self._steps in JUDGED:
            self._judge(engine)

    def _judge(self, engine: Engine) -> None:
        alive, touched = self._counts.clone()
        summed_over_ranks(engine, alive)
        engine.spread.mesh.world.all_reduce_max(touched)
        found = zip(self.names, alive.tolist(), touched.tolist(), strict=True)
        dead = [name for name, times, had in found if not times and had >= LEAST]
        if dead != self._noted:
            self._noted = dead
            self._note(
                "dead gradients", step=engine.step_number + 1, steps=self._steps, weights=dead, of=len(self.names)
            )
