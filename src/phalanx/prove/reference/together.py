"""Losses of several micro-batches that need each other's samples, on one device.

Here all micro-batches of a step are at hand, each with its graph. A loss is computed as far as its next question for
all samples; when every micro-batch has asked it, the answer is known, and losses are computed again from the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.logits import Logits
from phalanx.loss import Loss, counted_by
from phalanx.parallel.axes.samples import answered_by
from phalanx.train.rounds import unlike


class _Asked(BaseException):
    """Leaves a loss where it needs what other micro-batches bring."""

    def __init__(self, value: Tensor, join: Callable[[Sequence[Tensor]], Tensor]) -> None:
        super().__init__()
        self.value, self.join = value, join


class _Answers:
    """What the loss of one micro-batch is told."""

    def __init__(self, known: list[Tensor], slots: np.ndarray) -> None:
        self.known, self.slots, self.asked = known, slots, 0

    def gathered(self, x: Any) -> Tensor:
        return self._answer(x.tensor() if isinstance(x, Logits) else x, torch.cat)

    def own(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.slots)

    def counts(self, names: list[str], own: Tensor) -> Tensor:
        return self._answer(own, lambda every: torch.stack([*every]).sum(0))

    def _answer(self, value: Tensor, join: Callable[[Any], Tensor]) -> Tensor:
        number, self.asked = self.asked, self.asked + 1
        if number == len(self.known):
            raise _Asked(value, join)
        return self.known[number]


def losses_together(losses: Sequence[tuple[np.ndarray, Callable[[], Loss]]]) -> list[Loss]:
    """The loss of each micro-batch of a step, given its slots and what computes it."""
    known: list[Tensor] = []
    while True:
        found: list[Loss] = []
        asked: list[_Asked] = []
        for slots, loss in losses:
            answers = _Answers(known, slots)
            try:
                with answered_by(answers), counted_by(answers.counts):
                    found.append(loss())
            except _Asked as question:
                asked.append(question)
        if not asked:
            return found
        if found:
            raise unlike("in some micro-batches and not in others")
        known.append(asked[0].join([question.value for question in asked]))
