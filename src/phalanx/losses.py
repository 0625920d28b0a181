"""Losses that are ready, and the lazy logits of a language model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.errors import WrongUse
from phalanx.loss import Loss, sum
from phalanx.trees import mapped

__all__ = [
    "Logits", "Loss", "binary_cross_entropy", "cross_entropy", "mean_squared_error", "penalised",
    "penalty_factor", "sum",
]  # fmt: skip

LOGIT_ELEMENTS = 1 << 26  # logits alive at once in `cross_entropy`: 256 MiB in float32


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
class Sequence:
    """Which positions of sequences a rank counts the loss of, where each rank counts some."""

    own: Callable[[Tensor], Tensor]
    all_reduce: Callable[[Tensor], Tensor]


class Logits:
    """A model's last matrix product, not yet done: ``hidden @ weight.T + bias``.

    `cross_entropy` computes it in chunks and never holds it whole. Any other torch function, attribute or operator
    materialises it, so plain torch code on a model's output works unchanged. With a ``vocabulary``, the weight is a
    rank's part of it; with a ``sequence``, the loss is computed of some positions.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None, vocabulary: Vocabulary | None = None
    ) -> None:
        self.hidden, self.weight, self.bias, self.vocabulary = hidden, weight, bias, vocabulary
        self.sequence: Sequence | None = None
        self._grad = torch.is_grad_enabled()  # whoever makes them later means the model's call
        self._tensor: Tensor | None = None

    @property
    def lazy(self) -> bool:
        """Whether a loss may compute it in chunks: it has not been made and changed; float16 needs its scale first."""
        return self._tensor is None and self.hidden.dtype is not torch.float16

    @property
    def shape(self) -> torch.Size:
        classes = self.vocabulary.size if self.vocabulary else self.weight.shape[0]
        return torch.Size([*self.hidden.shape[:-1], classes])

    def tensor(self) -> Tensor:
        if self._tensor is None:
            with torch.set_grad_enabled(self._grad):
                if self.vocabulary is None:
                    self._tensor = F.linear(self.hidden, self.weight, self.bias)
                else:
                    own = F.linear(self.vocabulary.replicate(self.hidden), self.weight, self.bias)
                    self._tensor = self.vocabulary.all_gather(own)
        return self._tensor

    def summed_cross_entropy(self, targets: Tensor, ignore: int, smoothing: float) -> Tensor:
        """The summed cross-entropy of all rows, computed in chunks."""
        with torch.set_grad_enabled(self._grad and torch.is_grad_enabled()):
            hidden = self.hidden
            if self.sequence is not None:
                hidden, targets = self.sequence.own(hidden), self.sequence.own(targets)
            hidden = hidden.reshape(-1, hidden.shape[-1])
            if self.vocabulary is not None:
                hidden = self.vocabulary.replicate(hidden)
            total = _LinearCrossEntropy.apply(
                hidden, self.weight, self.bias, targets.reshape(-1), ignore, smoothing, self.vocabulary,
                torch.is_grad_enabled(),
            )  # fmt: skip
            return total if self.sequence is None else self.sequence.all_reduce(total)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _materialised((args, kwargs or {}))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)


def _materialised(value: Any) -> Any:
    return mapped(lambda logits: logits.tensor(), value, Logits)


def _operator(name: str) -> Any:
    def apply(self: Logits, *others: Any) -> Any:
        return getattr(self.tensor(), name)(*_materialised(others))

    return apply


OPERATORS = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "pow", "neg", "getitem", "setitem",
    "len", "iter", "abs", "round", "invert", "lt", "le", "gt", "ge", "eq", "ne",
)  # fmt: skip
for _name in OPERATORS:
    setattr(Logits, f"__{_name}__", _operator(f"__{_name}__"))


class _Penalised(torch.autograd.Function):
    """Passes ``x`` on, and gives the penalty the gradient that the loss's total has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, penalty: Tensor) -> Tensor:
        ctx.save_for_backward(penalty)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (penalty,) = ctx.saved_tensors
        return gradient, torch.full_like(penalty, _penalty_factor)


_penalty_factor = 1.0


@contextmanager
def penalty_factor(factor: float) -> Iterator[None]:
    """While a backward runs: what the loss's total is multiplied by, and penalties with it."""
    global _penalty_factor
    outer, _penalty_factor = _penalty_factor, factor
    try:
        yield
    finally:
        _penalty_factor = outer


def penalised(x: Tensor, penalty: Tensor) -> Tensor:
    """``x``, with a penalty bound to it that is minimised along with the loss.

    The penalty is a sum over a batch's terms, like a loss's total, and must not depend on which samples are computed
    together. It shows in the gradients, not in the loss that is reported.
    """
    return _Penalised.apply(x, penalty)


class _LinearCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of ``hidden @ weight.T + bias``, a chunk of rows at a time.

    The gradients are formed in the same pass, while a chunk's logits are at hand, and scaled in backward. ``recorded``
    says whether one will come.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        ignore: int,
        smoothing: float,
        vocabulary: Vocabulary | None,
        recorded: bool,
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        wanted = recorded and any(ctx.needs_input_grad[:3])
        grad_hidden = torch.empty_like(hidden) if wanted else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if wanted else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if wanted and bias is not None else None
        rows = max(1, LOGIT_ELEMENTS // (vocabulary.largest if vocabulary else weight.shape[0]))
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            logits = F.linear(hidden[part], weight, bias).to(wide)
            loss, grad = _rowwise(logits, targets[part], ignore, smoothing, wanted, vocabulary)
            total += loss
            if grad is not None and grad_hidden is not None and grad_weight is not None:
                if grad_bias is not None:
                    grad_bias += grad.sum(0)
                grad = grad.to(hidden.dtype)
                grad_hidden[part] = grad @ weight
                grad_weight += grad.T @ hidden[part]
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        narrow = grad_hidden.dtype
        return (
            grad_hidden * outer.to(narrow),
            (grad_weight * outer).to(narrow),
            None if grad_bias is None else (grad_bias * outer).to(narrow),
            None,
            None,
            None,
            None,
            None,
        )


def _rowwise(
    logits: Tensor, targets: Tensor, ignore: int, smoothing: float, wanted: bool, vocabulary: Vocabulary | None
) -> tuple[Tensor, Tensor | None]:
    """The summed loss of these rows and, where wanted, its gradient by the logits (which it overwrites)."""
    valid = (targets != ignore).unsqueeze(1)
    index = targets.where(targets != ignore, 0).unsqueeze(1)
    if vocabulary is None:
        here, classes = valid, logits.shape[1]
        normaliser, chosen = logits.logsumexp(1, keepdim=True), logits.gather(1, index)
        mean = logits.mean(1, keepdim=True)
    else:
        index = index - vocabulary.start
        here, classes = valid & (index >= 0) & (index < logits.shape[1]), vocabulary.size
        index = index.where(here, 0)
        normaliser, chosen, mean = _over_vocabulary(logits, index, here, vocabulary)
    loss = normaliser - (1 - smoothing) * chosen
    if smoothing:
        loss = loss - smoothing * mean
    loss = loss.where(valid, 0).sum()
    if not wanted:
        return loss, None
    grad = logits.sub_(normaliser).exp_()
    if smoothing:
        grad -= smoothing / classes
    if grad.shape[1]:
        grad.scatter_add_(1, index, torch.full_like(index, smoothing - 1, dtype=grad.dtype).where(here, 0))
    return loss, grad.mul_(valid)


def _over_vocabulary(
    logits: Tensor, index: Tensor, here: Tensor, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor, Tensor]:
    """Normaliser, chosen logit and mean of each row, over all ranks' parts of the vocabulary."""
    floor = torch.finfo(logits.dtype).min
    top = logits.max(1, keepdim=True).values if logits.shape[1] else logits.new_full((len(logits), 1), floor)
    vocabulary.all_reduce_max(top)
    chosen = logits.gather(1, index).where(here, 0) if logits.shape[1] else torch.zeros_like(top)
    sums = torch.cat([(logits - top).exp().sum(1, keepdim=True), chosen, logits.sum(1, keepdim=True)], 1)
    vocabulary.all_reduce(sums)
    spread, chosen, total = sums.split(1, 1)
    return top + spread.log(), chosen, total / vocabulary.size


def cross_entropy(
    output: Tensor | Logits, targets: Tensor, *, ignore: int = -100, label_smoothing: float = 0.0
) -> Loss:
    """Cross-entropy summed over all targets but those equal to ``ignore``, and how many those are.

    Classes are the last dim of ``output``, ``[batch, time, classes]``, or its second, ``[batch, classes, y, x]``.
    Targets that are real numbers, ``[..., classes]``, are the probability of each class.
    """
    if targets.is_floating_point():
        return _soft_cross_entropy(output, targets, label_smoothing)
    count = (targets != ignore).sum()
    if isinstance(output, Logits) and output.vocabulary is not None:
        output.vocabulary.check(targets.where(targets != ignore, 0), "target")
    if isinstance(output, Logits) and output.lazy:
        if output.shape[:-1] != targets.shape:
            raise _mismatch(output.shape, targets.shape)
        return Loss(output.summed_cross_entropy(targets, ignore, label_smoothing), count)
    logits = output.tensor() if isinstance(output, Logits) else output
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if logits.shape[:-1] == targets.shape:
        logits, targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    elif logits.shape[:1] + logits.shape[2:] != targets.shape:
        raise _mismatch(logits.shape, targets.shape)
    total = F.cross_entropy(logits, targets, ignore_index=ignore, label_smoothing=label_smoothing, reduction="sum")
    return Loss(total, count)


def _soft_cross_entropy(output: Tensor | Logits, targets: Tensor, smoothing: float) -> Loss:
    if output.shape[:-1] == targets.shape:
        raise WrongUse(
            f"the targets are {targets.dtype} of shape {tuple(targets.shape)}, one for each row of the output: as "
            "classes they must be whole numbers. Write targets.long()."
        )
    if output.shape != targets.shape:
        raise _mismatch(output.shape, targets.shape)
    logits = output.tensor() if isinstance(output, Logits) else output
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).reshape(-1, logits.shape[-1])
    wanted = targets.reshape(logits.shape).to(logits.dtype)
    total = F.cross_entropy(logits, wanted, label_smoothing=smoothing, reduction="sum")
    return Loss(total, len(logits))


def mean_squared_error(output: Tensor, targets: Tensor) -> Loss:
    """Squared differences, summed, and how many there are."""
    if output.shape != targets.shape:
        raise _mismatch(output.shape, targets.shape)
    wide = torch.promote_types(output.dtype, torch.float32)
    return Loss((output.to(wide) - targets.to(wide)).square().sum(), targets.numel())


def binary_cross_entropy(output: Tensor, targets: Tensor) -> Loss:
    """Cross-entropy of yes-or-no logits, summed, and how many there are."""
    if output.shape != targets.shape:
        raise _mismatch(output.shape, targets.shape)
    wide = torch.promote_types(output.dtype, torch.float32)
    total = F.binary_cross_entropy_with_logits(output.to(wide), targets.to(wide), reduction="sum")
    return Loss(total, targets.numel())


def _mismatch(output: torch.Size, targets: torch.Size) -> WrongUse:
    if output == targets:
        return WrongUse(
            f"the targets have the shape of the output, {tuple(output)}, and are whole numbers: as the probability of "
            "each class they must be real. Write targets.float(), or give the class alone: targets.argmax(-1)."
        )
    return WrongUse(
        f"the model's output has shape {tuple(output)} and the targets {tuple(targets)}: they do not belong together. "
        "Check what Task.loss passes to the loss."
    )
