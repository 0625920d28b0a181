"""Lazy logits: a language model's last matrix product, which waits until somebody needs it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.cross_entropy import AS_THEY_ARE
from phalanx.kernels.linear_cross_entropy import Kind, Vocabulary, linear_cross_entropy
from phalanx.kernels.linear_divergence import LinearHead, linear_divergence
from phalanx.kernels.linear_log_probs import linear_log_probs
from phalanx.trees import mapped


@dataclass(frozen=True)
class Sequence:
    """Which positions of sequences a rank counts the loss of, where each rank counts some."""

    own: Callable[[Tensor], Tensor]
    all_reduce: Callable[[Tensor], Tensor]


class Logits:
    """A model's last matrix product, not yet done: ``hidden @ weight.T + bias``.

    A cross-entropy computes it in chunks and never holds it whole: ours, and torch's of rows of it. So that it comes to
    that in code that knows nothing of it, what is commonly done to logits before is done lazily too: some of their
    rows, a view as rows, a dtype, a factor, soft-capping. Any other torch function, attribute or operator
    materialises it, so plain torch code on a model's output works unchanged. With a ``vocabulary``, the weight is a
    rank's part of it; with a ``sequence``, the loss is computed of some positions.

    The classes are the last dim, always. What is done lazily gives `Logits` again, also where it has to be computed:
    whether something is `Logits` depends on how the code is written, never on the layout or the precision.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None, vocabulary: Vocabulary | None = None
    ) -> None:
        self.hidden, self.weight, self.bias, self.vocabulary = hidden, weight, bias, vocabulary
        self.sequence: Sequence | None = None
        self.bending = AS_THEY_ARE
        self.narrow = False
        """Whether its gradients are products in 8 bits."""
        self.dtype = hidden.dtype
        self._grad = torch.is_grad_enabled()  # whoever makes them later means the model's call
        self._view: tuple[Logits, Callable[[Tensor], Tensor]] | None = None
        """Of which others they are some rows, or another view."""
        self._tensor: Tensor | None = None

    @property
    def lazy(self) -> bool:
        """Whether a loss may compute it in chunks: it has not been made and changed; float16 needs its scale first."""
        unmade = self._tensor is None and (self._view is None or self._view[0].lazy)
        return unmade and self.hidden.dtype is not torch.float16

    def computed(self, tensor: Tensor) -> Logits:
        """Logits that are computed already, with the classes in the last dim as before."""
        return self._with(hidden=tensor, dtype=tensor.dtype, vocabulary=None, sequence=None, _tensor=tensor, _view=None)

    @property
    def shape(self) -> torch.Size:
        if self._tensor is not None:
            return self._tensor.shape
        classes = self.vocabulary.size if self.vocabulary else self.weight.shape[0]
        return torch.Size([*self.hidden.shape[:-1], classes])

    def tensor(self) -> Tensor:
        if self._tensor is None:
            with torch.set_grad_enabled(self._grad):
                self._tensor = self._made() if self._view is None else self._view[1](self._view[0].tensor())
        return self._tensor

    def _made(self) -> Tensor:
        if self.vocabulary is None:
            found = F.linear(self.hidden, self.weight, self.bias)
        else:
            own = F.linear(self.vocabulary.replicate(self.hidden), self.weight, self.bias)
            found = self.vocabulary.all_gather(own)
        return self.bending(found.to(torch.promote_types(found.dtype, self.dtype))).to(self.dtype)

    def cross_entropy(self, targets: Tensor, ignore: int = -100, smoothing: float = 0.0) -> Tensor:
        """Summed over all targets but those to ignore; computed in chunks."""
        with torch.set_grad_enabled(self._grad and torch.is_grad_enabled()):
            hidden, targets = self._counted(targets)
            kind = Kind(ignore, smoothing, self.bending, self.narrow)
            total = linear_cross_entropy(
                hidden.flatten(0, -2), self.weight, self.bias, targets.flatten(), kind, self.vocabulary
            )
            return total if self.sequence is None else self.sequence.all_reduce(total)

    def weighted_cross_entropy(self, targets: Tensor, weight: Tensor, ignore: int = -100) -> Tensor:
        """Likewise with a weight for each class; backward computes each chunk of logits once more."""
        with torch.set_grad_enabled(self._grad and torch.is_grad_enabled()):
            hidden, targets = self._counted(targets)
            rows = self._log_probs(hidden, targets, ignore)
            total = -(rows * weight[targets.where(targets != ignore, 0).flatten()]).sum()
            return total if self.sequence is None else self.sequence.all_reduce(total)

    def log_probs(self, targets: Tensor, ignore: int = -100) -> Tensor:
        """Of each sequence, summed over all its targets but those to ignore; computed in chunks."""
        with torch.set_grad_enabled(self._grad and torch.is_grad_enabled()):
            hidden, targets = self._counted(targets)
            total = self._log_probs(hidden, targets, ignore).view(targets.shape).sum(-1)
            return total if self.sequence is None else self.sequence.all_reduce(total)

    def _log_probs(self, hidden: Tensor, targets: Tensor, ignore: int) -> Tensor:
        """Of each target; 0 for those to ignore."""
        kind = Kind(ignore, bending=self.bending)
        return linear_log_probs(hidden.flatten(0, -2), self.weight, self.bias, targets.flatten(), kind, self.vocabulary)

    def divergence(self, goal: Logits, counted: Tensor, reverse: bool = False) -> Tensor:
        """Of KL(goal || these), or with ``reverse`` of KL(these || goal), summed where it is ``counted``; in chunks."""
        with torch.set_grad_enabled(self._grad and torch.is_grad_enabled()):
            hidden, counted = self._counted(counted)
            others = goal.hidden if goal.sequence is None else goal.sequence.own(goal.hidden)
            total = linear_divergence(
                hidden.flatten(0, -2), self._head(), others.flatten(0, -2), goal._head(), counted.flatten(), reverse
            )
            return total if self.sequence is None else self.sequence.all_reduce(total)

    def meets(self, other: Logits) -> bool:
        """Whether both can be computed in the same chunks: lazily, of the same positions and parts of a vocabulary."""
        alike = (self.sequence is None) == (other.sequence is None)
        starts = [None if logits.vocabulary is None else logits.vocabulary.start for logits in (self, other)]
        return self.lazy and other.lazy and alike and starts[0] == starts[1] and self.shape == other.shape

    def _head(self) -> LinearHead:
        return LinearHead(self.weight, self.bias, self.bending, self.vocabulary)

    def _counted(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """What this rank computes the loss of, and its targets."""
        hidden = self.hidden
        if self.sequence is not None:
            hidden, targets = self.sequence.own(hidden), self.sequence.own(targets)
        return (hidden if self.vocabulary is None else self.vocabulary.replicate(hidden)), targets

    # What is done lazily, in the ways in which it is commonly written; in others it is done to the tensor.

    @property
    def ndim(self) -> int:
        return self.hidden.ndim

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self, **options: Any) -> Any:
        if options:
            return self.tensor().contiguous(**options)
        return self if self.lazy else self.computed(self.tensor().contiguous())

    def float(self, **options: Any) -> Any:
        return self.tensor().float(**options) if options else self.to(torch.float32)

    def to(self, *args: Any, **options: Any) -> Any:
        dtype = args[0] if len(args) == 1 and not options else None
        widest = torch.promote_types(self.hidden.dtype, torch.float32)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            return self.tensor().to(*args, **options)
        if not self.lazy or torch.promote_types(dtype, widest) != widest:
            return self.computed(self.tensor().to(dtype))
        dtype = self.hidden.new_empty(0).to(dtype).dtype  # a proof answers casts, and leaves some out
        return self if dtype == self.dtype else self._with(dtype=dtype, _view=None)

    def view(self, *shape: Any, **options: Any) -> Any:
        found = None if options else self._shaped(shape, Tensor.view)
        return self.tensor().view(*shape, **options) if found is None else found

    def reshape(self, *shape: Any, **options: Any) -> Any:
        found = None if options else self._shaped(shape, Tensor.reshape)
        return self.tensor().reshape(*shape, **options) if found is None else found

    def _shaped(self, shape: Any, function: Callable[..., Tensor]) -> Logits | None:
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if not sizes or not all(isinstance(size, int) for size in sizes) or sizes[-1] != self.shape[-1]:
            return None
        if not self._rows_alone:
            return self.computed(function(self.tensor(), sizes))
        hidden = self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1])
        return self._with(hidden=hidden, _view=(self, lambda tensor: tensor.reshape(sizes)))

    def __getitem__(self, key: Any) -> Any:
        if not _of_rows(key, self.ndim):
            return self.tensor()[_materialised(key)]
        if not self._rows_alone:
            return self.computed(self.tensor()[key])
        return self._with(hidden=self.hidden[key], _view=(self, lambda tensor: tensor[key]))

    def __truediv__(self, other: Any) -> Any:
        return self._scaled(1 / other, other) if _is_factor(other) else self.tensor() / _materialised(other)

    def __mul__(self, other: Any) -> Any:
        return self._scaled(other) if _is_factor(other) else self.tensor() * _materialised(other)

    __rmul__ = __mul__

    def tanh(self) -> Any:
        if self.lazy and not self.bending.outer:
            return self._with(bending=replace(self.bending, outer=1.0), _view=None)
        return self.computed(self.tensor().tanh())

    def _scaled(self, factor: Any, divisor: Any = None) -> Logits:
        if not self.lazy:
            return self.computed(self.tensor() * factor if divisor is None else self.tensor() / divisor)
        bent = self.bending
        changed = replace(bent, outer=bent.outer * factor) if bent.outer else replace(bent, inner=bent.inner * factor)
        return self._with(bending=changed, _view=None)

    @property
    def _rows_alone(self) -> bool:
        """Whether some of its rows can be had lazily."""
        return self.lazy and self.sequence is None

    def _with(self, **changed: Any) -> Logits:
        found = copy.copy(self)
        vars(found).update(changed)
        return found

    # Whatever else is done.

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tanh and len(args) == 1 and not kwargs:
            return args[0].tanh()
        if func is F.cross_entropy:
            found = _torchs_cross_entropy(*args, **(kwargs or {}))
            if found is not None:
                return found
        args, kwargs = _materialised((args, kwargs or {}))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)


def _torchs_cross_entropy(
    output: Any, targets: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor | None:  # fmt: skip
    """What torch's would find, computed in chunks; nothing where it cannot be."""
    plain = weight is None and size_average is None and reduce is None and reduction in ("mean", "sum")
    if not plain or not isinstance(output, Logits) or not output.lazy or output.sequence is not None:
        return None
    if output.ndim != 2 or not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    if output.shape[:1] != targets.shape or not 0 <= label_smoothing <= 1:
        return None
    total = output.cross_entropy(targets, ignore_index, label_smoothing)
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


def _is_factor(other: Any) -> bool:
    return isinstance(other, (int, float)) and not isinstance(other, bool) and other != 0 and math.isfinite(other)


def _of_rows(key: Any, ndim: int) -> bool:
    """Whether an index leaves the last dim as it is, and takes slices or single places of the others."""
    keys = key if isinstance(key, tuple) else (key,)
    if not keys:
        return False
    if not all(each is Ellipsis or (isinstance(each, (slice, int)) and not isinstance(each, bool)) for each in keys):
        return False
    dots = sum(each is Ellipsis for each in keys)
    if dots > 1 or len(keys) - dots > ndim:
        return False
    if len(keys) - dots < ndim and (not dots or keys[-1] is Ellipsis):
        return True
    return [each for each in keys if each is not Ellipsis][-1] == slice(None)


def _materialised(value: Any) -> Any:
    return mapped(lambda logits: logits.tensor(), value, Logits)


def _operator(name: str) -> Any:
    def apply(self: Logits, *others: Any) -> Any:
        return getattr(self.tensor(), name)(*_materialised(others))

    return apply


OPERATORS = (
    "add", "radd", "sub", "rsub", "rtruediv", "matmul", "pow", "neg", "setitem", "len", "iter", "abs", "round",
    "invert", "lt", "le", "gt", "ge", "eq", "ne", "rpow", "mod", "rmod", "floordiv", "rfloordiv", "rmatmul",
    "iadd", "isub", "imul", "itruediv",
)  # fmt: skip
for _name in OPERATORS:
    setattr(Logits, f"__{_name}__", _operator(f"__{_name}__"))
