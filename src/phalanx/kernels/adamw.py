"""Adam's update of many weights in one pass over memory: gradients scaled, moments, weights and their narrow copies.

Its plain twin is torch.optim's Adam and AdamW, before which gradients are scaled, and after which weights are copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.choice import Kernel
from phalanx.kernels.tables import Tables


@dataclass(frozen=True)
class Hyperparameters:
    """Of a group of weights in a step, the first of which is number 1."""

    step: int
    rate: float
    betas: tuple[float, float]
    tiny: float
    decay: float
    decoupled: bool
    """Whether weights decay by themselves (AdamW), or through their gradients (Adam)."""

    def numbers(self, factor: float) -> tuple[float, ...]:
        first, second = (1 - beta**self.step for beta in self.betas)
        added = (1 - beta for beta in self.betas)  # in float32 it would be off by 1e-4
        return factor, self.rate, *added, self.betas[1], self.tiny, self.decay, self.rate / first, math.sqrt(second)


@dataclass(frozen=True)
class Segment:
    """Elements of a weight that lie one after another in memory, and where they lie in the whole weight."""

    start: int
    size: int
    first: int = 0
    """In the whole, of the first of them;"""
    length: int = 0
    """so many are neighbours there, or all if 0,"""
    apart: int = 0
    """and the next so many begin so much further on."""


@dataclass(frozen=True)
class Updated:
    """A weight and all that its update reads and writes, each of one piece in memory."""

    weight: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor
    copy: Tensor | None
    """What a model computes with, where it is another dtype."""
    key: int = 0
    """Of the draws by which narrow moments are rounded."""
    segments: tuple[Segment, ...] = ()
    """Where elements lie in the whole weight; if it does not matter, none."""

    def rows(self) -> Iterator[tuple[Compiled, tuple[int, ...]]]:
        """Each segment as a kernel is told of it, and what the kernel is compiled for."""
        tensors = self.weight, self.gradient, self.first, self.second, self.copy
        for each in self.segments or (Segment(0, self.weight.numel()),):
            places = [0 if t is None else t.data_ptr() + each.start * t.element_size() for t in tensors]
            even = all(number % 16 == 0 for number in (*places, each.size))
            names = _name(self.gradient), _name(self.copy), _name(self.first)
            kind = Compiled(*names, even, together=each.length == 0)
            yield kind, (*places, each.size, self.key, each.first, each.length, each.apart)


class Compiled(NamedTuple):
    """What a kernel is compiled for."""

    gradient: str
    copy: str
    moments: str
    """These are dtypes."""
    even: bool
    """All begins and ends at even places, in bytes and elements."""
    together: bool
    """Elements are neighbours in the whole weight, too."""


class OnePass:
    """Updates the same weights again and again; where they lie is told to the device when that changes."""

    def __init__(self) -> None:
        self._tables = Tables()

    def prepared(self, updated: Sequence[Updated], key: object = None) -> Callable[[Hyperparameters, float], None]:
        """What updates these weights, given a factor of their gradients. All but the launch is done here.

        ``key``: says which of several lots of weights these are.
        """
        from phalanx.kernels.adamw_triton import SPAN, update  # triton takes longer to import than all of us

        device = updated[0].weight.device
        tables = [
            (kind, *self._tables.told((key, kind), rows, [row[5] for row in rows], SPAN, device))
            for kind, rows in _kinds(updated).items()
        ]

        def launch(numbers: Hyperparameters, factor: float) -> None:
            for kind, places, spans in tables:
                if len(spans):
                    update(places, spans, numbers.numbers(factor), numbers.step, kind, numbers.decoupled)

        return launch


def _kinds(updated: Sequence[Updated]) -> dict[Compiled, list[tuple[int, ...]]]:
    found: dict[Compiled, list[tuple[int, ...]]] = {}
    for one in updated:
        for kind, row in one.rows():
            found.setdefault(kind, []).append(row)
    return found


def _name(tensor: Tensor | None) -> str:
    return "" if tensor is None else str(tensor.dtype).removeprefix("torch.")


def _trial(device: torch.device) -> bool:
    weight = torch.linspace(-3, 3, 40, device=device)
    twin = weight.clone().requires_grad_()
    first, second = torch.zeros(2, 40, device=device)
    own = Updated(weight, weight.neg(), first, second, weight.bfloat16())
    OnePass().prepared([own])(Hyperparameters(1, 0.1, (0.9, 0.9999), 1e-8, 0.1, decoupled=True), 0.5)
    twin.grad = -twin.detach() / 2
    torch.optim.AdamW([twin], lr=0.1, betas=(0.9, 0.9999), weight_decay=0.1).step()
    assert own.copy is not None
    return torch.allclose(weight, twin, rtol=1e-4) and torch.allclose(own.copy.float(), weight, rtol=1e-2)


KERNEL = Kernel.declared("Adam's update", _trial)
