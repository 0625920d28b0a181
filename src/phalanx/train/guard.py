"""Bad numbers: a loss or gradient that is not finite, or a loss far beyond the last ones, and what is done about it.

Ranks judge by numbers that they have agreed on, so that they all come to the same conclusion.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import CannotHere, WrongUse

KNOWN, LEAST = 64, 16
"""How many of the last losses a spike is held against, and how many there must be."""
IN_A_ROW = 20
"""So many bad steps in a row are no accident."""
ACTIONS = ("skip", "rollback", "stop")


@dataclass
class Guard:
    """``skip``: the bad step's update is left out. ``rollback``: back to the last kept state, and all data from there
    up to the bad step is left out. ``stop``: the run ends."""

    action: str = "skip"
    spike: float = 0.0
    """A loss of more than so many times the median of the last ones is bad; 0: none is."""
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=KNOWN))
    bad_in_a_row: int = 0
    left_out: set[int] = field(default_factory=set)
    """Steps whose data is not trained on."""

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise WrongUse(f"--bad {self.action} is not known. Choose one of: {', '.join(ACTIONS)}.")
        if self.spike and not self.spike > 1:
            raise WrongUse(f"--spike {self.spike:g} would call ordinary losses bad. Give a factor above 1, such as 3.")

    def judge(self, loss: float, norm: float) -> str:
        """What is bad about a step, before its update; nothing, mostly."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(norm):
            return f"the gradient's norm is {norm}"
        if self.spike and len(self.losses) >= LEAST:
            usual = statistics.median(self.losses)
            if loss > self.spike * usual > 0:
                return f"the loss of {loss:.4g} is {loss / usual:.1f} times the median of the last {len(self.losses)}"
        return ""

    def note(self, loss: float, bad: str, step: int) -> None:
        """After a step's judgement."""
        if not bad:
            if math.isfinite(loss):  # a step that counted nothing has none
                self.losses.append(loss)
            self.bad_in_a_row = 0
            return
        self.bad_in_a_row += 1
        if self.action == "stop" or self.bad_in_a_row >= IN_A_ROW:
            raise BadNumbers(
                f"step {step + 1}: {bad}"
                + (f", as were {self.bad_in_a_row - 1} steps before it" if self.bad_in_a_row > 1 else "")
                + ". Its samples are in the run's events. Look at those, or lower the learning rate."
            )

    def leave_out(self, steps: Iterable[int]) -> None:
        self.left_out |= set(steps)

    def state(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "bad_in_a_row": self.bad_in_a_row, "left_out": sorted(self.left_out)}

    def restore(self, state: dict[str, Any]) -> None:
        self.losses.clear()
        self.losses.extend(state["losses"])
        self.bad_in_a_row = state["bad_in_a_row"]
        self.left_out |= set(state["left_out"])


def first_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The name of the first that holds a number which is not finite; nothing, mostly."""
    for name, tensor in tensors:
        # a sum is quicker by far, and is not finite if any number is not; only large ones overflow without
        if not math.isfinite(tensor.sum(dtype=torch.float64)) and not tensor.isfinite().all():
            return name
    return ""


class BadNumbers(CannotHere):
    """The run's own numbers say that it should not go on. A finding: starting again would not help."""

    exit_code = 1
