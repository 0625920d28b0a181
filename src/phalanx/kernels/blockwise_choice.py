"""Which of those that make codes of few bits is used: all give the same bits."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import Tensor

from phalanx.kernels import blockwise, blockwise_cpu
from phalanx.kernels.choice import Kernel


def fastest(like: Tensor) -> ModuleType:
    """What is used for numbers like these; a proof's, in float64, are the twin's."""
    if like.dtype == torch.float32 and KERNEL.used(like):
        return _on_gpu()
    return blockwise_cpu if blockwise_cpu.used(like) else blockwise


def _on_gpu() -> ModuleType:
    return importlib.import_module("phalanx.kernels.blockwise_triton")  # triton comes with torch's builds for GPUs


def _trial(device: torch.device) -> bool:
    return all(same(_on_gpu(), bits, device) for bits in blockwise.BLOCKS)


def same(way: ModuleType, bits: int, device: torch.device | str) -> bool:
    """Whether a way gives what the twin gives, for a few numbers of all sizes."""
    blocks, full = 11, blockwise.FULL[bits] - 1 / 16
    generator = torch.Generator().manual_seed(bits)
    x, owed = torch.randn(2, blocks * blockwise.BLOCKS[bits], generator=generator)
    x = x * torch.logspace(-20, 20, blocks).repeat_interleave(blockwise.BLOCKS[bits])
    x[: blockwise.BLOCKS[bits]], owed[: blockwise.BLOCKS[bits]] = 0, 0
    x[-1] = torch.nan
    counts = torch.full((blocks,), blockwise.BLOCKS[bits], dtype=torch.int32)
    counts[3:5] = torch.tensor([7, 0])
    x[3 * blockwise.BLOCKS[1] + 7 : 5 * blockwise.BLOCKS[1]] = 0  # what does not count is nothing
    owed[3 * blockwise.BLOCKS[1] + 7 : 5 * blockwise.BLOCKS[1]] = 0
    found = []
    for each in (blockwise, way):
        mine, more = x.to(device), owed.to(device)
        out = torch.zeros(2, blocks * blockwise.block_bytes(bits, x.dtype), dtype=torch.uint8, device=device)
        left, total = torch.empty_like(mine), torch.empty_like(mine)
        each.encode(mine, bits, full, out[0])
        each.encode(mine, bits, full, out[1], more, left, counts.to(device))
        each.decode(out, bits, total, counts.to(device))
        found.append((left.nan_to_num(), total.nan_to_num(), out[:, : -blockwise.block_bytes(bits, x.dtype)]))
    return all(map(torch.equal, *found))


KERNEL = Kernel.declared("codes of few bits", _trial)
