"""Codes of 4 bits as the numbers that they stand for: a table's value times the scale of its block."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from phalanx.kernels import choice

BLOCK = 64
"""Elements that share a scale."""
CODE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Of bitsandbytes."""
AT_ONCE = 1 << 22, 1 << 18
"""Elements that the twin makes real at a time, of 6 bytes each until they are rounded: on a GPU, so that launches cost
little beside them, and on a CPU, so that they stay in its caches."""


@torch.library.custom_op("phalanx::widened_nf4", mutates_args=())
def widened(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """One after the other, two of each byte, the upper half first; ``scale``: of each block, in float32."""
    found = packed.new_empty(2 * len(packed), dtype=dtype)
    if KERNEL.used(found):
        from phalanx.kernels.nf4_triton import widen  # triton takes longer to import than all of us

        widen(packed, scale, table(packed.device), found)
    else:
        _widen(packed, scale, found)
    return found


@widened.register_fake
def _(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return packed.new_empty(2 * len(packed), dtype=dtype)


@cache
def table(device: torch.device) -> Tensor:
    """Of the 16 values."""
    return torch.tensor(CODE, device=device)


def _widen(packed: Tensor, scale: Tensor, found: Tensor) -> None:
    """The plain twin."""
    values = table(packed.device)
    pairs = torch.cartesian_prod(values, values)  # of each byte
    together = AT_ONCE[packed.device.type == "cpu"]
    parts = zip(found.split(together), packed.split(together // 2), scale.split(together // BLOCK), strict=True)
    for part, codes, factor in parts:
        real = pairs.index_select(0, codes.to(torch.int32)).view(-1, BLOCK).mul_(factor.unsqueeze(1))
        part.copy_(real.view(-1))


def _trial(device: torch.device) -> bool:
    from phalanx.kernels.nf4_triton import widen

    packed = torch.arange(256, device=device).repeat(5).to(torch.uint8)
    scale = torch.linspace(1e-3, 3, len(packed) * 2 // BLOCK, device=device)
    works = True
    for dtype in choice.NARROW:
        found, twin = (torch.empty(2 * len(packed), dtype=dtype, device=device) for _ in range(2))
        widen(packed, scale, table(device), found)
        _widen(packed, scale, twin)
        works = works and torch.equal(found, twin)
    return works


KERNEL = choice.Kernel.declared("weights in 4 bits", _trial)
