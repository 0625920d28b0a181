"""Methods that change in a run, as ``comm=auto`` has them, on one device: what was owed is added once, wherever it was.

A proof does not measure: it changes the method at each step.
"""

from __future__ import annotations

from torch import Tensor, nn, optim

from phalanx.comm import EXACT
from phalanx.prove.reference.coded import OWING, Coded, State

TURNS = ("int8", "int4", EXACT, "bf16")
"""By step, from the first on again and again: half way, where a proof interrupts its run, something is owed."""


def method_of(step: int) -> str:
    """With which gradients travel in a step of a proof."""
    return TURNS[step % len(TURNS)]


class Switching(Coded):
    """Each step has a method of its own."""

    def begin(self, step: int, optimizer: optim.Optimizer, trained: dict[str, nn.Parameter]) -> None:
        self.method = method_of(step)

    def _said(self, name: str, sender: int, numbers: Tensor) -> Tensor:
        key = name, sender
        owed = self.next_owed.get(key, self.owed.get(key))
        numbers = numbers if owed is None else numbers + owed
        said = numbers if self.method == EXACT else self.rounded(self.method, name, numbers)
        if self.method in OWING:
            self.next_owed[key] = numbers - said
        elif owed is not None:
            self.next_owed[key] = numbers * 0
        return said

    def gathered(self, weights: State) -> State:
        """As they are: only gradients are made small."""
        return weights
