"""What a restored tensor is, where it is not what was saved: nothing, another step's, other rows, another part."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from phalanx.parallel.axes.cuts import Cut
from phalanx.parallel.weights.weight import Weight
from phalanx.prove.explanation import algebra
from phalanx.prove.ladder import SAME_AS, Standard

Part = Callable[[Tensor], Tensor]
WRITTEN, READ, KEPT, RESUMED = "written", "read", "kept", "resumed"
"""Where a state that is not what it was went wrong."""


def likeness(
    standard: Standard,
    step: int,
    rung: str,
    name: str,
    found: Tensor | None,
    part: Part | None,
    weight: Weight | None,
    cut: Cut | None,
    index: int,
) -> str:
    """In words. ``weight`` is what it is or belongs to, ``cut`` how that is divided, ``index`` which part is here."""
    kind = SAME_AS.get(rung, rung)
    take = part or (lambda whole: whole)
    whole = standard.expected(step, kind, name)
    if found is None:
        return "was not restored: there is none"
    if whole is None:
        return "should not be there"
    found, want = found.detach().double(), take(whole).double()
    if found.shape != want.shape:
        return f"has shape {tuple(found.shape)}, not {tuple(want.shape)}"
    if (lost := _rows(found.isnan())) and not bool(want.isnan().any()):
        whole_of_it = lost == (0, len(found) if found.ndim else 1)
        return "was not restored" if whole_of_it else f"was not restored in its rows {lost[0]}:{lost[1]}"
    if not float(found.norm()) and float(want.norm()):
        return "was not restored: it is zero"
    for words, other in _other_times(standard, step, kind, name):
        if algebra.same(found, take(other).double()) and not algebra.same(want, take(other).double()):
            return words
    if part is not None and weight is not None and found.ndim:
        for words, other in _other_places(whole, weight, cut, index, found.shape, rung == "weights in use"):
            if algebra.same(found, other.double()):
                return words
    return _shape(found, want)


def _other_times(standard: Standard, step: int, rung: str, name: str) -> Iterator[tuple[str, Tensor]]:
    """What it was at other times."""
    if rung in ("weights", "buffers"):
        yield "was not restored: it is as the model's constructor made it", standard.initial[name]
    for other in range(len(standard.steps)):
        value = standard.expected(other, rung, name)
        if value is not None and other != step:
            yield f"is that of another step: it is as after step {other}, not as after step {step}", value


def _other_places(
    whole: Tensor, weight: Weight, cut: Cut | None, index: int, shape: torch.Size, in_use: bool
) -> Iterator[tuple[str, Tensor]]:
    """What lies elsewhere in the whole tensor: other parts, other rows."""
    own = cut.take(whole, index) if cut else whole
    for other in range(len(cut.spans)) if cut else ():
        if cut is not None and other != index:
            theirs = cut.take(whole, other)
            theirs = theirs if in_use else theirs[weight.first : weight.last]
            if theirs.shape == shape:
                yield f"has the part of rank {other} of {cut.axis} where that of rank {index} belongs", theirs
    rows = shape[0]
    for first in range(own.shape[0] - rows + 1 if not in_use else 0):
        if first != weight.first:
            words = f"has rows {first}:{first + rows} where rows {weight.first}:{weight.last} belong"
            yield words, own[first : first + rows]


def _shape(found: Tensor, want: Tensor) -> str:
    times = algebra.ratio(found, want)
    if times is not None:
        return f"is {algebra.number(times)} times what was saved"
    if (dim := algebra.reordered(found, want)) is not None:
        return f"has the right rows in another order, along dim {dim}"
    if (few := algebra.single(found, want)) is not None:
        return f"is wrong in {few} of {found.numel()} elements and right in all others"
    wrong = _rows((found - want).abs() > algebra.EXACT * want.abs().max())
    if wrong and found.ndim and wrong != (0, len(found)):
        return f"is wrong in its rows {wrong[0]}:{wrong[1]}, and right in the others"
    if (dtype := algebra.precision(found, want)) is not None:
        return f"is off by what {dtype} rounds: it went through a lower precision"
    return "is not what was saved"


def _rows(places: Tensor) -> tuple[int, int] | None:
    """The run of rows in which something is, if anything is."""
    rows = places.reshape(len(places) if places.ndim else 1, -1).any(1).nonzero().view(-1).tolist()
    return (rows[0], rows[-1] + 1) if rows else None
