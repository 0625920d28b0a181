"""Adam's update of weights that live in the host's memory: piece by piece on the GPU, while others come and go.

    host    weight, both moments  ->  a piece of them on the GPU, updated by the kernel  ->  host

What the model computes with, where all of it is on the GPU, is written by the kernel too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from operator import is_
from typing import Any

import torch
from torch import Tensor

from phalanx.kernels.adamw import Hyperparameters, OnePass, Segment, Updated
from phalanx.parallel.communication.copying import Copying
from phalanx.parallel.communication.memory import Room

PIECE = 1 << 24
"""Elements that travel together: a part of a large weight, or several small ones."""
APART = 16
"""Of several, each begins at a multiple of so many."""
STAGINGS = 3
"""So many are on the GPU: one comes, one is updated, one goes."""


class Staging:
    """A piece's memory on the GPU."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.free: Callable[[], None] = lambda: None
        """Has the device wait until what was here has gone."""
        self._rows = torch.empty(3, size * torch.float32.itemsize, dtype=torch.uint8, device=device)

    def like(self, pieces: Sequence[Updated]) -> Iterator[Updated]:
        """The same pieces with room here for each and its moments."""
        begin = 0
        for piece in pieces:
            at_home = piece.weight, piece.first, piece.second
            weight, first, second = (
                row[begin * tensor.itemsize : (begin + len(tensor)) * tensor.itemsize].view(tensor.dtype)
                for row, tensor in zip(self._rows, at_home, strict=True)
            )
            begin += _room(piece)
            yield replace(piece, weight=weight, first=first, second=second)


class StreamedPass:
    """Updates weights as `OnePass` does, which lie on the host with their moments; gradients are on the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._one_pass = OnePass()
        self._coming, self._going = Copying(device), Copying(device)
        self._staging: list[Staging] = []

    def prepared(self, updated: Sequence[Updated], key: object = None) -> Callable[[Hyperparameters, float], None]:
        """What updates these weights, given a factor of their gradients; they are back after `finish`."""
        lots = list(together(pieces(updated)))
        largest = max((sum(map(_room, lot)) for lot in lots), default=0)

        def launch(numbers: Hyperparameters, factor: float) -> None:
            self._make_staging(largest)
            for number, lot in enumerate(lots):
                self._update(self._staging[number % STAGINGS], lot, (key, number), numbers, factor)

        return launch

    def finish(self) -> None:
        """The host waits until all are back."""
        self._going.finish()

    def _make_staging(self, size: int) -> None:
        if not self._staging or self._staging[0].size < size:
            self._staging = [Staging(size, self.device) for _ in range(STAGINGS)]

    def _update(
        self, staging: Staging, lot: Sequence[Updated], key: object, numbers: Hyperparameters, factor: float
    ) -> None:
        here = list(staging.like(lot))
        pairs = list(zip(map(_travels, here), map(_travels, lot), strict=True))
        staging.free()
        with self._coming.beside() as arrived:
            for there, at_home in pairs:
                for tensor, other in zip(there, at_home, strict=True):
                    tensor.copy_(other, non_blocking=True)
        arrived()
        self._one_pass.prepared(here, key)(numbers, factor)
        with self._going.beside() as staging.free:
            for there, at_home in pairs:
                for tensor, other in zip(there, at_home, strict=True):
                    other.copy_(tensor, non_blocking=True)


def _travels(piece: Updated) -> tuple[Tensor, Tensor, Tensor]:
    return piece.weight, piece.first, piece.second


def _room(piece: Updated) -> int:
    return -(-len(piece.weight) // APART) * APART


def together(pieces: Iterable[Updated]) -> Iterator[list[Updated]]:
    """Small ones after one another in lots, each no larger than a piece."""
    lot: list[Updated] = []
    size = 0
    for piece in pieces:
        if lot and size + _room(piece) > PIECE:
            yield lot
            lot, size = [], 0
        lot.append(piece)
        size += _room(piece)
    if lot:
        yield lot


def pieces(updated: Sequence[Updated]) -> Iterator[Updated]:
    """The same in pieces that are small enough, each a row."""
    for one in updated:
        for begin in range(0, one.weight.numel(), PIECE):
            weight, gradient, first, second = (
                tensor.view(-1)[begin : begin + PIECE] for tensor in (one.weight, one.gradient, one.first, one.second)
            )
            copy = None if one.copy is None else one.copy.view(-1)[begin : begin + PIECE]
            cut = (part for segment in one.segments for part in _within(segment, begin, begin + PIECE))
            yield Updated(weight, gradient, first, second, copy, one.key, tuple(cut))


def _within(segment: Segment, begin: int, end: int) -> Iterator[Segment]:
    """What of a segment lies in a piece, as segments of the piece."""
    at, end = max(begin, segment.start), min(end, segment.start + segment.size)
    length = segment.length or segment.size
    while at < end:
        row, column = divmod(at - segment.start, length)
        whole = (end - at) // length * length if not column else 0
        size = whole or min(length - column, end - at)
        first = segment.first + row * segment.apart + column
        together = size <= length
        yield Segment(at - begin, size, first, 0 if together else length, 0 if together else segment.apart)
        at += size


class Homes:
    """What Adam keeps of shards, on the host in memory that a GPU copies quickly."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._made: dict[Tensor, list[Tensor]] = {}
        """By shard, the moments that were made here."""

    def has(self, shard: Tensor, state: dict[str, Any] | None) -> bool:
        """Whether this state is where it is to be."""
        if not state:
            return False
        made = self._made.get(shard, [])
        return shard.device == self.device or (all(map(is_, made, _moments(state).values())) and bool(made))

    def bring(self, shard: Tensor, state: dict[str, Any] | None, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        """The same state there, begun in a dtype where there is none yet."""
        if not state:
            zeros = torch.zeros((), dtype=dtype).expand(shard.shape)
            counter = torch.zeros((), device=shard.device)  # beside the weight, as torch's fused updates want it
            state = {"step": counter, "exp_avg": zeros, "exp_avg_sq": zeros}
        found = dict(state)
        for name, value in _moments(state).items():
            found[name] = Room(value.shape, value.dtype, shard.device, self.device).tensor.copy_(value)
        self._made[shard] = list(_moments(found).values())
        return found


def _moments(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor) and value.ndim}
