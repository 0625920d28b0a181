"""Losses that are quotients of sums over a batch, as soft Dice, IoU and Tversky losses are: where they divide."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from phalanx.train.check import lines
from phalanx.train.check.parts import differ
from phalanx.train.check.subject import Subject

REVERSED = {"__rtruediv__", "__rdiv__"}
DIVISIONS = {"__truediv__", "div", "divide", "true_divide"} | REVERSED


class Quotients(TorchFunctionMode):
    """Notes each division by what depends on trained weights: the line, the divisor and the result."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        name = getattr(func, "__name__", "")
        if name in DIVISIONS and len(args) > 1:
            divisor = args[0] if name in REVERSED else args[1]
            if isinstance(divisor, Tensor) and divisor.requires_grad:
                self.made.append((lines.running(), divisor.detach().clone(), result.detach().clone()))
        return result


def quotient(subject: Subject, pair: tuple[range, range], evaluate: bool) -> str:
    """The line where a loss divides by a sum over the batch of what the model predicts; empty if there is none.

    Neither the divisor nor the result has samples: they have one shape for a batch and for a part of it.
    """
    found = []
    for places in (subject.places, pair[1]):
        with torch.enable_grad(), Quotients() as quotients:
            subject.compute(places, evaluate=evaluate)
        found.append([made for made in quotients.made if made[0]])
    for (line, *whole), (other, *alone) in zip(*found, strict=False):
        if line != other:
            return ""  # another way was taken
        alike = all(a.shape == b.shape for a, b in zip(whole, alone, strict=True))
        if alike and all(differ(a, b, subject.dtype) for a, b in zip(whole, alone, strict=True)):
            return line
    return ""
