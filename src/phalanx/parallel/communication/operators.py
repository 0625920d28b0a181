"""Collectives as operators of torch's: a compiler takes each as one step of its program, and never looks inside.

What runs is the communicator's own collective, counted and recorded like any other. Programs of different ranks may
differ, and a compiler is free to order what does not depend on each other; so a collective that follows another one
without using its result is told so, by ``after``.
"""

from __future__ import annotations

from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.library import custom_op

from phalanx.parallel.communication import narrowed
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.narrow import EXACTLY, Narrow

_groups: WeakValueDictionary[str, Communicator] = WeakValueDictionary()
"""By handle: an operator takes words, and no objects."""


def known(group: Communicator) -> Communicator:
    """The same, which operators find by its handle from now on.

    A program is made for a handle. Whoever comes after another one gets the same, and its programs.
    """
    group.handle = next(name for n in count() if (name := f"{group.name} {n}") not in _groups)
    _groups[group.handle] = group
    return group


def forget(group: Communicator) -> None:
    """Before it is closed."""
    _groups.pop(group.handle, None)


def all_gathered(part: Tensor, group: Communicator, after: Tensor | None = None, narrow: Narrow = EXACTLY) -> Tensor:
    """Everybody's parts, ``[ranks, *part]``, which travel as ``narrow`` says."""
    if torch.compiler.is_compiling():
        return _all_gather(part, group.handle, group.size, after, narrow.kind)
    return narrowed.start_all_gather(part, group, narrow)()


def all_reduced(x: Tensor, group: Communicator, narrow: Narrow = EXACTLY) -> Tensor:
    """The sum over the ranks of what travels, as does the sum, as ``narrow`` says."""
    if torch.compiler.is_compiling():
        return _all_reduce(x, group.handle, narrow.kind)
    return narrowed.start_all_reduce(x, group, narrow)()


def reduce_scattered(parts: Tensor, group: Communicator, narrow: Narrow = EXACTLY) -> Tensor:
    """The sum over the ranks of this rank's row of ``parts``, each of which travels as ``narrow`` says."""
    if torch.compiler.is_compiling():
        return _reduce_scatter(parts, group.handle, narrow.kind)
    return narrowed.start_reduce_scatter(parts, group, narrow)()


def exchanged(rows: Tensor, group: Communicator, narrow: Narrow = EXACTLY) -> Tensor:
    """Row r of every rank that has it for rank r, each of which travels as ``narrow`` says."""
    if torch.compiler.is_compiling():
        return _all_to_all(rows, group.handle, narrow.kind)
    return narrowed.all_to_all(rows, group, narrow)


@custom_op(
    "phalanx::all_gather",
    mutates_args=(),
    schema="(Tensor part, str group, int ranks, Tensor? after, str kind) -> Tensor",
)
def _all_gather(part: Tensor, group: str, ranks: int, after: Tensor | None, kind: str) -> Tensor:
    return all_gathered(part.contiguous(), _groups[group], narrow=Narrow(kind))


@_all_gather.register_fake
def _(part: Tensor, group: str, ranks: int, after: Tensor | None, kind: str) -> Tensor:
    return part.new_empty(ranks, *part.shape)


@custom_op("phalanx::all_reduce", mutates_args=(), schema="(Tensor x, str group, str kind) -> Tensor")
def _all_reduce(x: Tensor, group: str, kind: str) -> Tensor:
    return all_reduced(x, _groups[group], Narrow(kind))


@_all_reduce.register_fake
def _(x: Tensor, group: str, kind: str) -> Tensor:
    return x.new_empty(x.shape)


@custom_op("phalanx::reduce_scatter", mutates_args=(), schema="(Tensor parts, str group, str kind) -> Tensor")
def _reduce_scatter(parts: Tensor, group: str, kind: str) -> Tensor:
    return reduce_scattered(parts.contiguous(), _groups[group], Narrow(kind))


@_reduce_scatter.register_fake
def _(parts: Tensor, group: str, kind: str) -> Tensor:
    return parts.new_empty(parts.shape[1:])


@custom_op("phalanx::all_to_all", mutates_args=(), schema="(Tensor rows, str group, str kind) -> Tensor")
def _all_to_all(rows: Tensor, group: str, kind: str) -> Tensor:
    return exchanged(rows, _groups[group], Narrow(kind))


@_all_to_all.register_fake
def _(rows: Tensor, group: str, kind: str) -> Tensor:
    return rows.new_empty(rows.shape)
