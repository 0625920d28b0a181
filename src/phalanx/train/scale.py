"""Loss scaling, which keeps float16 gradients in range. It follows the step's shared decision, so ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class LossScale:
    """A factor on the loss: halves after an overflow, doubles after ``patience`` good steps. 1 unless dynamic."""

    def __init__(self, dynamic: bool, patience: int = 2000) -> None:
        self.dynamic, self.patience = dynamic, patience
        self.value, self.good_steps = 1.0, 0
        self._begun = not dynamic

    def begin(self, count: Callable[[], float]) -> None:
        """At the first step: 2**16 for a mean, and so much less for a sum of ``count()`` terms."""
        if not self._begun:
            self.value = 2.0 ** (16 - max(0, int(count()) - 1).bit_length())
            self._begun = True

    def state(self) -> list[float]:
        return [self.value, self.good_steps, self._begun]

    def restore(self, state: Sequence[float]) -> None:
        self.value, self.good_steps, self._begun = float(state[0]), int(state[1]), bool(state[2])

    def update(self, finite: bool) -> float:
        """After a step; by which factor the next one's gradients will be larger."""
        if not self.dynamic:
            return 1.0
        before = self.value
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value /= 2
        elif self.good_steps == self.patience:
            self.value, self.good_steps = self.value * 2, 0
        return self.value / before
