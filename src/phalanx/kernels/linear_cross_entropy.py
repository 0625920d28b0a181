"""Cross-entropy of a matrix product that is never whole: a chunk of rows at a time, its gradients in the same pass.

What it costs is its three products, and on a GPU two readings of narrow logits and one writing: the gradient lies where
the logits were, and the head's is summed up inside its product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels import cross_entropy, fp8, fp8_head

LOGIT_ELEMENTS = 1 << 26
"""Logits alive at once on a processor: 256 MiB in float32."""
KERNEL_ELEMENTS = 1 << 29
"""Likewise where kernels read them as narrow as they are: 1 GiB in bfloat16. With fewer rows, a product would read
and write the head's gradient for longer than it computes."""


@dataclass(frozen=True)
class Vocabulary:
    """A rank's part of a vocabulary, and how it comes to terms with the ranks that have the others."""

    size: int
    """Of the whole."""
    start: int
    largest: int
    """Of the ranks' parts: all of them compute as many chunks."""
    replicate: Callable[[Tensor], Tensor]
    all_gather: Callable[[Tensor], Tensor]
    all_reduce: Callable[[Tensor], None]
    all_reduce_max: Callable[[Tensor], None]

    def check(self, ids: Tensor, what: str) -> None:
        check_ids(ids, self.size, what)


def check_ids(ids: Tensor, size: int, what: str) -> None:
    """Refuse ids that no rank's part of a vocabulary has; on a GPU the CPU would have to wait for the answer."""
    if not ids.is_cuda and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < size:
        raise IndexError(f"a {what} of {int(ids.min())} to {int(ids.max())} is outside of the vocabulary of {size}")


@dataclass(frozen=True)
class Kind:
    """Which cross-entropy of logits is meant."""

    ignore: int = -100
    """Rows with this target have no loss."""
    smoothing: float = 0.0
    bending: cross_entropy.Bending = cross_entropy.AS_THEY_ARE
    narrow: bool = False
    """Whether its gradients are products in 8 bits, where sizes allow."""


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, kind: Kind, vocabulary: Vocabulary | None
) -> Tensor:
    """Summed over all rows of ``hidden``, ``[rows, width]``, but those that are left out."""
    targets = as_classes(targets, weight, kind, vocabulary)
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return LinearCrossEntropy.apply(hidden, weight, bias, targets, kind, vocabulary, torch.is_grad_enabled())


class LinearCrossEntropy(torch.autograd.Function):
    """The gradients are formed in forward, while a chunk's logits are at hand, and scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        kind: Kind,
        vocabulary: Vocabulary | None,
        recorded: bool,
    ) -> Tensor:
        """``recorded``: whether a backward may come."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        by_hidden, by_weight, by_bias = (recorded and needed for needed in ctx.needs_input_grad[:3])
        made = ProductGradients(hidden, weight, bias, (by_hidden, by_weight, by_bias))
        product = Product.of(weight, bias, wide, vocabulary)
        chunks = product.chunks(len(hidden), fp8.MULTIPLE if kind.narrow else 1)
        plain = bias is None and kind.bending.none and by_hidden and by_weight
        narrow = fp8_head.HeadGradients(hidden, weight, chunks) if kind.narrow and plain and chunks else None
        narrow = narrow if narrow is not None and narrow.fit else None
        for part in chunks:
            logits = product(hidden[part])
            room = None if narrow is None else narrow.room(part)
            loss, grad = row_losses(logits, targets[part], kind, by_hidden or by_weight or by_bias, vocabulary, room)
            total += loss
            if grad is None:
                continue
            if narrow is None:
                made.add(part, grad)
                continue
            assert made.by_hidden is not None
            made.by_hidden[part], made.by_weight = narrow.products(part, grad, made.by_weight)
        ctx.save_for_backward(*made.taken())
        ctx.narrow = hidden.dtype
        return total

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the gradient of a loss of lazy logits cannot be differentiated. Make them first: output.tensor()"
            )

        found = (g if g is None else cross_entropy.scaled(g, outer, ctx.narrow) for g in ctx.saved_tensors)
        return (*found, None, None, None, None)


class ProductGradients:
    """Of ``hidden @ weight.T + bias`` by its factors, in sums as wide as float32, a chunk of rows after another."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]) -> None:
        """``needed``: by hidden, by weight and by bias."""
        self.hidden, self.weight = hidden, weight
        self.wide = torch.promote_types(hidden.dtype, torch.float32)
        self.by_hidden = torch.empty_like(hidden) if needed[0] else None
        self.by_weight: Tensor | None = None
        self.by_bias = torch.zeros_like(bias, dtype=self.wide) if needed[2] and bias is not None else None
        self._weights_too = needed[1]

    def add(self, part: slice, grad: Tensor) -> None:
        """Of a chunk of rows: their gradient by the product."""
        if self.by_bias is not None:
            self.by_bias += grad.sum(0, dtype=self.wide)
        grad = grad.to(self.hidden.dtype)
        if self.by_hidden is not None:
            torch.mm(grad, self.weight, out=self.by_hidden[part])
        if self._weights_too:
            self.by_weight = added_product(self.by_weight, grad.T, self.hidden[part], self.wide)

    def taken(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """By hidden, by weight and by bias."""
        if self._weights_too and self.by_weight is None:  # there are no rows
            self.by_weight = torch.zeros_like(self.weight, dtype=self.wide)
        return self.by_hidden, self.by_weight, self.by_bias


class Product:
    """``hidden @ weight.T + bias``, a chunk of rows at a time, each in the place of the last one."""

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, wide: torch.dtype, vocabulary: Vocabulary | None) -> Product:
        """With as many chunks as on the ranks that have other parts of the vocabulary."""
        return cls(weight, bias, wide, vocabulary.largest if vocabulary else weight.shape[0])

    def __init__(self, weight: Tensor, bias: Tensor | None, wide: torch.dtype, largest: int) -> None:
        """``largest``: how many classes the rank with most of them has."""
        self.weight, self.bias, self.wide, self.largest = weight, bias, wide, max(1, largest)
        self.narrow = cross_entropy.KERNEL.used(weight)
        self._room = weight.new_empty(0)

    def chunks(self, rows: int, multiple: int = 1) -> list[slice]:
        """As few as memory allows, alike, as many on all ranks of a vocabulary; rows a multiple, but for the last."""
        most = KERNEL_ELEMENTS if self.narrow else LOGIT_ELEMENTS
        number = math.ceil(rows / max(1, most // self.largest))
        each = math.ceil(rows / max(1, number) / multiple) * multiple
        return [slice(start, start + each) for start in range(0, rows, each)] if rows else []

    def __call__(self, hidden: Tensor) -> Tensor:
        if not self.narrow:
            return F.linear(hidden, self.weight, self.bias).to(self.wide)
        classes = self.weight.shape[0]
        if len(self._room) < len(hidden):  # rows begin at even places, for wide words
            self._room = hidden.new_empty(len(hidden), -(-classes // 16) * 16)
        logits = self._room[: len(hidden), :classes]
        if self.bias is None:
            return torch.mm(hidden, self.weight.T, out=logits)
        return torch.addmm(self.bias, hidden, self.weight.T, out=logits)


def added_product(total: Tensor | None, one: Tensor, other: Tensor, wide: torch.dtype) -> Tensor:
    """A wide sum, in its place, with a product of narrow factors added: inside of the product where the device can."""
    if one.dtype == wide:
        return one @ other if total is None else total.addmm_(one, other)
    if one.is_cuda and cross_entropy.KERNEL.used(one):
        if total is None:
            return torch.mm(one, other, out_dtype=wide)
        return torch.addmm(total, one, other, out_dtype=wide, out=total)
    product = (one @ other).to(wide)
    return product if total is None else total.add_(product)


def row_losses(
    logits: Tensor, targets: Tensor, kind: Kind, wanted: bool, vocabulary: Vocabulary | None, room: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The summed loss of these rows and, where wanted, its gradient by the logits (which it overwrites).

    ``room``: where the gradient goes in 8 bits, scaled.
    """
    valid, index, found, normaliser = normalised(logits, targets, kind, vocabulary)
    classes = logits.shape[1] if vocabulary is None else vocabulary.size
    loss = normaliser - (1 - kind.smoothing) * found.chosen
    if kind.smoothing:
        loss = loss - kind.smoothing * found.total / classes
    loss = loss.where(valid, 0).sum()
    if not wanted:
        return loss, None
    share, factor = kind.smoothing / classes, 1.0 if room is None else fp8_head.SCALE
    return loss, cross_entropy.gradient_(
        logits, index, normaliser, valid, share, kind.smoothing, kind.bending, room, factor
    )


def as_classes(targets: Tensor, weight: Tensor, kind: Kind, vocabulary: Vocabulary | None) -> Tensor:
    """Targets as numbers of classes, refused if there is none of a number."""
    targets = targets.long()
    if not targets.is_cuda:
        size = weight.shape[0] if vocabulary is None else vocabulary.size
        check_ids(targets.where(targets != kind.ignore, 0), size, "target")
    return targets


def normalised(
    logits: Tensor, targets: Tensor, kind: Kind, vocabulary: Vocabulary | None
) -> tuple[Tensor, Tensor, cross_entropy.Statistics, Tensor]:
    """Of each row: whether it counts, where in this part its target is, sums over its logits, and its normaliser."""
    valid = targets != kind.ignore
    start, classes = (0, logits.shape[1]) if vocabulary is None else (vocabulary.start, vocabulary.size)
    index = targets - start
    index = index.where(valid & (index >= 0) & (index < logits.shape[1]), -1)
    known = (targets >= 0) & (targets < classes)
    found = cross_entropy.statistics(logits, index, kind.bending)
    if vocabulary is not None:
        found = over_vocabulary(found, vocabulary)
    # a target that there is none of must not go unseen
    return valid, index, found, (found.top + found.spread.log()).where(known | ~valid, math.nan)


def over_vocabulary(own: cross_entropy.Statistics, vocabulary: Vocabulary) -> cross_entropy.Statistics:
    """Over all ranks' parts of the vocabulary."""
    top = own.top.clone()
    vocabulary.all_reduce_max(top)
    sums = torch.stack([own.spread * (own.top - top).exp(), own.chosen, own.total])
    vocabulary.all_reduce(sums)
    return cross_entropy.Statistics(top, *sums)
