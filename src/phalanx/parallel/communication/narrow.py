"""Activations and their gradients on the way from rank to rank, in fewer bits: a layout's ``activations``.

    bf16    numbers without their last bits
    fp8     codes of 8 bits, e4m3, and a scale for each row, the last dim: its largest number by the largest code

Rows are rounded each by itself, so that it makes no difference which of them are computed together. A row with a number
that is not finite becomes one of which none is. What is no wider than that is sent as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
MOST = torch.finfo(FP8).max


class Narrow:
    """One way to make them narrow."""

    def __init__(self, kind: str) -> None:
        """``kind``: as a layout has it; with ``exact`` everything is sent as it is."""
        self.kind = kind

    @contextmanager
    def off(self) -> Iterator[None]:
        """While this lasts everything is sent as it is."""
        kind, self.kind = self.kind, "exact"
        try:
            yield
        finally:
            self.kind = kind

    def narrows(self, dtype: torch.dtype) -> bool:
        """Whether numbers of a dtype are sent as less."""
        return self.kind != "exact" and dtype.itemsize > (1 if self.kind == "fp8" else 2)

    def room(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """For a message of numbers of a shape."""
        if not self.narrows(dtype):
            return torch.empty(shape, dtype=dtype, device=device)
        if self.kind == "bf16":
            return torch.empty(shape, dtype=torch.bfloat16, device=device)
        rows, columns = _matrix(shape)
        return torch.empty(rows, columns + 4, dtype=torch.uint8, device=device)

    def encode(self, x: Tensor) -> Tensor:
        """Numbers to a message."""
        if not self.narrows(x.dtype):
            return x.contiguous()
        if self.kind == "bf16":
            return x.to(torch.bfloat16, memory_format=torch.contiguous_format)
        if not x.numel():
            return self.room(x.shape, x.dtype, x.device)
        rows = x.reshape(_matrix(x.shape))
        largest = rows.abs().amax(1, keepdim=True)
        scale = (largest.to(_wide(x.dtype)) / MOST).float()
        scale = torch.where(scale == 0, 1, scale)  # of nothing
        codes = (rows / scale).clamp(-MOST, MOST).to(FP8)
        return torch.cat([codes.view(torch.uint8), scale.contiguous().view(torch.uint8)], 1)

    def encode_each(self, parts: Tensor) -> Tensor:
        """Parts ``[ranks, ...]`` to a message for each rank."""
        message = self.encode(parts)
        if self.kind != "fp8" or not self.narrows(parts.dtype):
            return message
        return message.view(len(parts), len(message) // len(parts), message.shape[1])

    def decode(self, message: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A message, or one of each rank, to numbers."""
        if not self.narrows(dtype):
            return message
        if self.kind == "bf16":
            return message.to(dtype)
        if not message.numel():
            return torch.empty(shape, dtype=dtype, device=message.device)
        codes, scale = message[..., :-4].contiguous().view(FP8), message[..., -4:].contiguous().view(torch.float32)
        wide = _wide(dtype)
        return (codes.to(wide) * scale.to(wide)).to(dtype).view(*shape)

    def rounded(self, x: Tensor) -> Tensor:
        """Numbers as they arrive."""
        return self.decode(self.encode(x), x.shape, x.dtype)


EXACTLY = Narrow("exact")


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What scales are computed in: a row's largest by the largest code may be too small a number for 16 bits."""
    return torch.promote_types(dtype, torch.float32)


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Rows, and numbers in each."""
    size, columns = torch.Size(shape).numel(), shape[-1] if len(shape) else 1
    return size // max(1, columns), columns
