"""Where many tensors lie, as a kernel that goes through all of them in one launch is told; again when that changes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.kernels.transfer import sent


class Tables:
    """Tables on the device, each of them known by a key."""

    def __init__(self) -> None:
        self._rows: dict[object, tuple[Sequence[tuple[int, ...]], Tensor]] = {}
        self._spans: dict[object, tuple[Sequence[int], Tensor]] = {}

    def told(
        self, key: object, rows: Sequence[tuple[int, ...]], sizes: Sequence[int], span: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """``rows`` on the device, one a tensor; and which span of which of them each program has, as `spans_of` says.

        ``sizes``: elements of each; ``span``: those of one program.
        """
        known, spans = self._rows.get(key), self._spans.get(key)
        if known is None or known[0] != rows:
            known = self._rows[key] = rows, sent(torch.tensor(rows), device)
        if spans is None or spans[0] != sizes:  # there are many of them: a hundred thousand of a billion weights
            spans = self._spans[key] = sizes, sent(spans_of(sizes, span), device)
        return known[1], spans[1]


def spans_of(sizes: Sequence[int], span: int) -> Tensor:
    """``[programs, 2]``: which of several tensors, and which span of it."""
    counts = torch.tensor([math.ceil(size / span) for size in sizes])
    which = torch.arange(len(sizes)).repeat_interleave(counts)
    first = (counts.cumsum(0) - counts)[which]
    return torch.stack([which, torch.arange(len(which)) - first], 1).int()
