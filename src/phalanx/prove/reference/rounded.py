"""Activations as they arrive in fewer bits, and their gradients on the way back: the definition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def as_sent(x: Tensor, kind: str, forward: bool = True, backward: bool = True) -> Tensor:
    """Numbers that are sent and so rounded, and so are their gradients, or one of the two."""
    found: Tensor = Rounded.apply(x, kind, forward, backward)
    return found


class Rounded(Function):
    """The same, for autograd, which takes arguments by their place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, forward: bool, backward: bool) -> Tensor:
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
