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

from phalanx.parallel.communication.communicator import Communicator

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


def all_gathered(part: Tensor, group: Communicator, after: Tensor | None = None) -> Tensor:
    """Everybody's parts, ``[ranks, *part]``."""
    if torch.compiler.is_compiling():
        return _all_gather(part, group.handle, group.size, after)
    every = part.new_empty(group.size, *part.shape)
    group.all_gather(every, part).wait()
    return every


def all_reduced(x: Tensor, group: Communicator) -> Tensor:
    """The sum over the ranks."""
    if torch.compiler.is_compiling():
        return _all_reduce(x, group.handle)
    total = x.clone().contiguous()
    group.all_reduce(total).wait()
    return total


def reduce_scattered(parts: Tensor, group: Communicator) -> Tensor:
    """The sum over the ranks of this rank's row of ``parts``."""
    if torch.compiler.is_compiling():
        return _reduce_scatter(parts, group.handle)
    own = parts.new_empty(parts.shape[1:])
    group.reduce_scatter(own, parts).wait()
    return own


def exchanged(rows: Tensor, group: Communicator) -> Tensor:
    """Row r of every rank that has it for rank r."""
    if torch.compiler.is_compiling():
        return _all_to_all(rows, group.handle)
    return group.all_to_all(rows)


@custom_op(
    "phalanx::all_gather", mutates_args=(), schema="(Tensor part, str group, int ranks, Tensor? after) -> Tensor"
)
def _all_gather(part: Tensor, group: str, ranks: int, after: Tensor | None) -> Tensor:
    return all_gathered(part.contiguous(), _groups[group])


@_all_gather.register_fake
def _(part: Tensor, group: str, ranks: int, after: Tensor | None) -> Tensor:
    return part.new_empty(ranks, *part.shape)


@custom_op("phalanx::all_reduce", mutates_args=(), schema="(Tensor x, str group) -> Tensor")
def _all_reduce(x: Tensor, group: str) -> Tensor:
    return all_reduced(x, _groups[group])


@_all_reduce.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape)


@custom_op("phalanx::reduce_scatter", mutates_args=(), schema="(Tensor parts, str group) -> Tensor")
def _reduce_scatter(parts: Tensor, group: str) -> Tensor:
    return reduce_scattered(parts.contiguous(), _groups[group])


@_reduce_scatter.register_fake
def _(parts: Tensor, group: str) -> Tensor:
    return parts.new_empty(parts.shape[1:])


@custom_op("phalanx::all_to_all", mutates_args=(), schema="(Tensor rows, str group) -> Tensor")
def _all_to_all(rows: Tensor, group: str) -> Tensor:
    return exchanged(rows, _groups[group])


@_all_to_all.register_fake
def _(rows: Tensor, group: str) -> Tensor:
    return rows.new_empty(rows.shape)
