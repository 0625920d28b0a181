"""Activations as they arrive in fewer bits, and their gradients on the way back: the definition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class Rounded(Function):
    """Rounded, and its gradient too, or one of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, forward: bool = True, backward: bool = True) -> Tensor:
        ctx.kind, ctx.rounds = kind, backward
        return rounded(kind, x) if forward else x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return rounded(ctx.kind, gradient) if ctx.rounds else gradient, None, None, None


def rounded(kind: str, x: Tensor) -> Tensor:
    """Numbers as they arrive."""
    if kind == "bf16":
        return x.to(torch.bfloat16).to(x.dtype)
    scale = (x.abs().amax(-1, keepdim=True) / 448).float().to(x.dtype)
    codes = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.to(x.dtype) * scale).where(scale != 0, 0)
