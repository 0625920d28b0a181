"""Parts of a described weight, made without the rest of it: bit for bit what the whole would hold there.

Draws are numbered by an element's place, so those of a box can be had alone, and so can what is computed from them
element by element. A rank of thousands draws its own rows and no others. What looks at other elements (orthogonal, a
permutation, a product) is made whole, and the box is taken from it. A constructor that looks at values, as torch's
trunc_normal_ does to reject some, has made them whole before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.parallel.weights.blueprint import DRAWS, FACTORIES, Blueprint, Constant, Operation, Ref
from phalanx.parallel.weights.boxes import Box
from phalanx.trees import leaves, mapped

aten = torch.ops.aten
OVERWRITES = {aten.uniform_.default, aten.normal_.default, aten.zero_.default, aten.fill_.Scalar}
LIKE = {aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default}
ELEMENTWISE = {aten.zero_.default, aten.fill_.Scalar, aten.copy_.default, aten.clone.default, *LIKE}
"""Besides those that torch itself says it of."""


def parts(blueprint: Blueprint, tensor: Tensor, boxes: Sequence[Box], device: torch.device) -> list[Tensor]:
    """What `Blueprint.value` would hold in each of these boxes."""
    if not boxes:
        return []
    whole, operations = blueprint.leading_to(tensor)
    if whole is not None and all(_elementwise(operation, whole) for operation in operations):
        lasting = _without_overwritten(operations, whole)
        return [_Replay(blueprint, whole, box, device).run(lasting) for box in boxes]
    value = blueprint.value(tensor, device)
    return [value[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))] for box in boxes]


def _rows(ref: Ref, whole: Ref) -> tuple[int, int] | None:
    """Which rows of a tensor like ``whole`` a view is, if it is a run of them."""
    row = math.prod(whole.size[1:])
    expected = 1
    for size, stride in zip(reversed(ref.size), reversed(ref.stride), strict=True):
        if size != 1 and stride != expected:
            return None
        expected *= size
    if not row or not ref.size or ref.offset % row or expected % row:
        return None
    return ref.offset // row, (ref.offset + expected) // row


def _elementwise(operation: Operation, whole: Ref) -> bool:
    """Whether each element that an operation gives depends on the elements in its own place alone."""
    func, refs = operation.func, list(leaves((operation.args, operation.kwargs), Ref))
    every = 0, whole.size[0] if whole.size else 0
    if any(_rows(ref, whole) != every or ref.size != whole.size for ref in operation.results if ref not in refs):
        return False
    if func in FACTORIES or func in (aten.randn.default, aten.rand.default):
        return True
    pointwise = torch.Tag.pointwise in func.tags or func in ELEMENTWISE or func in DRAWS
    rows = {_rows(ref, whole) for ref in refs}
    numbers = all(c.tensor.ndim == 0 for c in leaves((operation.args, operation.kwargs), Constant))
    return pointwise and numbers and len(rows) == 1 and None not in rows and len({ref.size for ref in refs}) == 1


def _without_overwritten(operations: Sequence[Operation], whole: Ref) -> Sequence[Operation]:
    """Less what is drawn and then drawn anew, as a layer's own initialisation by its model's."""
    if len({ref.storage for op in operations for ref in [*leaves(op.args, Ref), *op.results]}) > 1:
        return operations
    last = [i for i, op in enumerate(operations) if op.func in OVERWRITES and op.args[0].size == whole.size]
    return [operations[0], *operations[last[-1] :]] if last else operations


class _Replay:
    """Operations done again on one box of every tensor that they are about."""

    def __init__(self, blueprint: Blueprint, whole: Ref, box: Box, device: torch.device) -> None:
        self.blueprint, self.whole, self.box, self.device = blueprint, whole, box, device
        self.made: dict[int, Tensor] = {}

    @torch.no_grad()
    def run(self, operations: Sequence[Operation]) -> Tensor:
        for operation in operations:
            self._do(operation)
        return self.made[self.whole.storage]

    def _do(self, operation: Operation) -> None:
        func, refs = operation.func, list(leaves((operation.args, operation.kwargs), Ref))
        first, last = (_rows(refs[0], self.whole) if refs else None) or (0, self.whole.size[0])
        start, stop = max(first, self.box.offsets[0]), min(last, self.box.offsets[0] + self.box.sizes[0])
        if start >= stop:
            return  # about other rows

        def real(value: Any) -> Any:
            if isinstance(value, Constant):
                return value.tensor
            return self.made[value.storage][start - self.box.offsets[0] : stop - self.box.offsets[0]]

        args, kwargs = mapped(real, (operation.args, operation.kwargs), (Ref, Constant))
        if func in FACTORIES:
            func, args = _sized(func, args, self.box.sizes)
        elif not refs:
            args = (self.box.sizes, *args[1:])
        if not refs or "device" in kwargs:
            kwargs["device"] = self.device
        if operation.draw:
            place = (start - first, *self.box.offsets[1:]), (last - first, *self.whole.size[1:])
            result = self.blueprint.draw(operation, func, args, kwargs, place)
        else:
            result = func(*args, **kwargs)
        for ref in operation.results:
            self.made.setdefault(ref.storage, result)


def _sized(func: Any, args: Any, sizes: Sequence[int]) -> tuple[Any, Any]:
    """A factory's call for other sizes."""
    if func is aten.empty_strided.default:
        return aten.empty.memory_format, (sizes, *args[2:])
    return func, (sizes, *args[1:])
