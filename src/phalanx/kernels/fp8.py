"""A linear's three products in 8 bits: its output, the gradient of its input and that of its weight.

Numbers are scaled so that the largest fits. With one scale a tensor, it is the largest of the step before that is made
to fit, with room: so a tensor is cast by what makes it, and looked through for the next step where its 8 bits are read
anyway, to be transposed. With one scale a row, every product looks for its own.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phalanx.kernels import choice
from phalanx.parallel.torch_private import scaled_product

Scaling = Literal["tensorwise", "rowwise"]
FINE, WIDE = torch.float8_e4m3fn, torch.float8_e5m2
"""Three bits behind the point, and two with more range, for gradients."""
MULTIPLE = 16
"""What products in 8 bits want their sizes to be multiples of."""
ROOM = 2.0
"""So many times what was largest before still fits. What is larger is cut off, and scales grow as much in a step."""
MAXIMA = 3
"""Numbers that are noted of a linear: the largest of its input, its weight and the gradient of its output."""


def fits(*sizes: int) -> bool:
    """Whether there are products of such sizes in 8 bits."""
    return not any(size % MULTIPLE for size in sizes)


def tensorwise(x: Tensor, weight: Tensor, maxima: Tensor, of_x: Tensor, known: bool) -> Tensor:
    """``x @ weight.T``, with scales from ``maxima``, or, where they are not ``known``, from the numbers themselves.

    ``of_x``: the first of them, which linears with the same input share: a compiler then casts it once. The gradient of
    ``maxima`` is what they were: no other way out of a compiled backward is as plain. (Of several calls it is the sum.)
    """
    rows, count = _rows(x)
    return Tensorwise.apply(rows, weight, maxima, of_x, known)[:count].view(*x.shape[:-1], len(weight))


def rowwise(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T``, every row of a factor with a scale of its own."""
    rows, count = _rows(x)
    return Rowwise.apply(rows, weight)[:count].view(*x.shape[:-1], len(weight))


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """All of ``x`` as rows, and how many they are, with zeros after them to a multiple: gradients sum over them."""
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    return (rows if fits(count) else F.pad(rows, [0, 0, 0, -count % MULTIPLE])), count


class Tensorwise(Function):
    """One scale a tensor. The weight's 8 bits are made again in backward: sharded, it is let go of in between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, maxima: Tensor, of_x: Tensor, known: bool) -> Tensor:
        scale_x = scale(of_x if known else largest(x), FINE)
        scale_weight = scale(maxima[1] if known else largest(weight), FINE)
        narrow = narrowed(x, scale_x, FINE)
        ctx.save_for_backward(narrow, weight, maxima, scale_x, scale_weight)
        ctx.known = known
        return product(narrow, narrowed(weight, scale_weight, FINE), 1 / scale_x, 1 / scale_weight, x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, maxima, scale_x, scale_weight = ctx.saved_tensors
        scale_own = scale(maxima[2] if ctx.known else largest(gradient), WIDE)
        narrow, narrow_weight = narrowed(gradient, scale_own, WIDE), narrowed(weight, scale_weight, FINE)
        by_x = by_weight = by_maxima = None
        if ctx.needs_input_grad[0]:
            columns, top_weight = transposed(narrow_weight)
            by_x = product(narrow, columns, 1 / scale_own, 1 / scale_weight, gradient.dtype)
        else:
            top_weight = largest(narrow_weight)
        if ctx.needs_input_grad[1]:
            (columns, top), (columns_x, top_x) = transposed(narrow), transposed(x)
            by_weight = product(columns, columns_x, 1 / scale_own, 1 / scale_x, gradient.dtype)
        else:
            top, top_x = largest(narrow), largest(x)
        if ctx.needs_input_grad[2]:
            by_maxima = torch.stack([top_x / scale_x, top_weight / scale_weight, top / scale_own])
        return by_x, by_weight, by_maxima, None, None


class Rowwise(Function):
    """One scale a row of each factor, along what a product sums over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return rowwise_product(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        by_x = rowwise_product(gradient, weight.t()) if ctx.needs_input_grad[0] else None
        by_weight = rowwise_product(gradient.t(), x.t()) if ctx.needs_input_grad[1] else None
        return by_x, by_weight


def largest(tensor: Tensor) -> Tensor:
    """In size."""
    return tensor.float().abs().amax()


def scale(maximum: Tensor, dtype: torch.dtype, room: float = ROOM) -> Tensor:
    """What brings numbers up to this into a dtype's range."""
    return torch.finfo(dtype).max / (room * maximum).clamp_min(1e-30)


def narrowed(tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Times a factor, in 8 bits. What goes beyond them becomes the largest there is, but infinity is no number."""
    top = torch.finfo(dtype).max
    scaled = tensor.float() * factor
    return scaled.clamp(-top, top).where(scaled.abs() < torch.inf, torch.nan).to(dtype)


def product(one: Tensor, other: Tensor, by_one: Tensor, by_other: Tensor, dtype: torch.dtype) -> Tensor:
    """``one @ other.T``, each times its factor: one for all of it, or one a row."""
    if not one.is_cuda:  # the twin: the same numbers, widened
        return ((one.float() * by_one) @ (other.float() * by_other).T).to(dtype)
    return scaled_product(one.contiguous(), other.contiguous().t(), by_one, by_other.t(), dtype)


@torch.library.custom_op("phalanx::transposed", mutates_args=())
def transposed(narrow: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix of 8 bits transposed in memory, and the largest of it in size."""
    if choice.interpreted or (narrow.is_cuda and KERNEL.works(narrow.device)):
        from phalanx.kernels.fp8_triton import transposed as kernel  # triton takes longer to import than all of us

        return kernel(narrow)
    return narrow.t().contiguous(), largest(narrow)


def transpose_into(narrow: Tensor, found: Tensor) -> None:
    """A matrix of 8 bits, transposed, into columns of another."""
    if choice.interpreted or (narrow.is_cuda and KERNEL.works(narrow.device)):
        from phalanx.kernels.fp8_triton import transpose

        transpose(narrow, found)
    else:
        found.copy_(narrow.t())


@transposed.register_fake
def _(narrow: Tensor) -> tuple[Tensor, Tensor]:
    return narrow.new_empty(narrow.shape[1], narrow.shape[0]), narrow.new_empty((), dtype=torch.float32)


def rowwise_product(one: Tensor, other: Tensor) -> Tensor:
    """``one @ other.T``."""
    by_one, by_other = (scale(t.abs().amax(1, keepdim=True).float(), FINE, room=1.0) for t in (one, other))
    narrow, narrow_other = narrowed(one, by_one, FINE), narrowed(other, by_other, FINE)
    return product(narrow, narrow_other, 1 / by_one, 1 / by_other, one.dtype)


def _trial(device: torch.device) -> bool:
    from phalanx.kernels.fp8_triton import transposed as kernel

    works = True
    for dtype in (FINE, WIDE):
        narrow = torch.linspace(-3, 2, 33 * 150, device=device).view(33, 150).to(dtype)
        columns, top = kernel(narrow)
        works = works and torch.equal(columns.view(torch.uint8), narrow.t().contiguous().view(torch.uint8))
        works = works and torch.equal(top, largest(narrow))
    return works


KERNEL = choice.Kernel.declared("transposing 8 bits", _trial)
