"""Adam's update of weights that live in the host's memory: piece by piece on the GPU, while others come and go.

    host    weight, both moments  ->  a piece of them on the GPU, updated by the kernel  ->  host

What the model computes with, where all of it is on the GPU, is written by the kernel too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.kernels.adamw import Hyperparameters, OnePass, Updated
from phalanx.parallel.communication.copying import Copying
from phalanx.parallel.communication.memory import Room

PIECE = 1 << 24
"""Elements that travel together."""
STAGINGS = 3
"""So many are on the GPU: one comes, one is updated, one goes."""


class Staging:
    """A piece's memory on the GPU."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.tensors = torch.empty(3, size, device=device)
        """Of a weight and its moments."""
        self.free: Callable[[], None] = lambda: None
        """Has the device wait until what was here has gone."""


class StreamedPass:
    """Updates weights as `OnePass` does, which lie on the host with their moments; gradients are on the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._one_pass = OnePass()
        self._coming, self._going = Copying(device), Copying(device)
        self._staging: list[Staging] = []

    def prepared(self, updated: Sequence[Updated], key: object = None) -> Callable[[Hyperparameters, float], None]:
        """What updates these weights, given a factor of their gradients. The host waits until they are back."""

        def launch(numbers: Hyperparameters, factor: float) -> None:
            travelling = list(pieces(updated))
            self._make_staging(max((len(piece.weight) for piece in travelling), default=0))
            for number, piece in enumerate(travelling):
                self._update(self._staging[number % STAGINGS], piece, (key, number), numbers, factor)
            self._going.finish()

        return launch

    def _make_staging(self, size: int) -> None:
        if not self._staging or self._staging[0].tensors.shape[1] < size:
            self._staging = [Staging(size, self.device) for _ in range(STAGINGS)]

    def _update(self, staging: Staging, piece: Updated, key: object, numbers: Hyperparameters, factor: float) -> None:
        at_home = piece.weight, piece.first, piece.second
        weight, first, second = here = [tensor[: len(piece.weight)] for tensor in staging.tensors]
        staging.free()
        with self._coming.beside() as arrived:
            for tensor, other in zip(here, at_home, strict=True):
                tensor.copy_(other, non_blocking=True)
        arrived()
        self._one_pass.prepared([Updated(weight, piece.gradient, first, second, piece.copy)], key)(numbers, factor)
        with self._going.beside() as staging.free:
            for tensor, other in zip(here, at_home, strict=True):
                other.copy_(tensor, non_blocking=True)


def pieces(updated: Sequence[Updated]) -> Iterator[Updated]:
    """The same in pieces that are small enough, each a row."""
    for one in updated:
        for begin in range(0, one.weight.numel(), PIECE):
            weight, gradient, first, second = (
                tensor.view(-1)[begin : begin + PIECE] for tensor in (one.weight, one.gradient, one.first, one.second)
            )
            copy = None if one.copy is None else one.copy.view(-1)[begin : begin + PIECE]
            yield Updated(weight, gradient, first, second, copy)


def is_home(shard: Tensor, state: dict[str, Any] | None, device: torch.device) -> bool:
    """Whether what Adam keeps of a shard is there; on the host, in memory that a GPU copies quickly."""
    if not state:
        return False
    return shard.device == device or all(value.is_pinned() for value in _moments(state).values())


def brought_home(shard: Tensor, state: dict[str, Any] | None, device: torch.device) -> dict[str, Any]:
    """The same state there, begun where there is none yet."""
    if not state:
        zeros = torch.zeros((), dtype=shard.dtype).expand(shard.shape)
        moments = dict.fromkeys(("exp_avg", "exp_avg_sq"), zeros)
        state = {"step": torch.tensor(0.0), **moments}
    rooms = {name: Room(value.shape, value.dtype, shard.device, device) for name, value in _moments(state).items()}
    return {**state, **{name: room.tensor.copy_(state[name]) for name, room in rooms.items()}}


def _moments(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor) and value.ndim}
