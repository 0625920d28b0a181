"""What a rank owes: the part of its gradients that bytes did not say, added to what it sends next.

It is state, as an optimizer's moments are. A step writes what will be owed after it beside what was owed before, which
is saved meanwhile; a step that is left out changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Self

import torch
from torch import Tensor

from phalanx.parallel.communication.memory import Room


class Owed:
    """Of one bucket's gradients, or of their sums by whoever has made those. It takes memory when it is first used."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._rooms: list[Room] = []
        self._turned = False

    @property
    def begun(self) -> bool:
        """Whether anything was ever owed, and there is memory for it."""
        return bool(self._rooms)

    def begin(self) -> Self:
        """Owe nothing."""
        if not self._rooms:
            self._rooms = [Room(self._shape, self._dtype, self._device) for _ in range(2)]
            for room in self._rooms:
                room.tensor.zero_()
        return self

    @property
    def now(self) -> Tensor:
        """After the last step that counted."""
        return self.begin()._rooms[0].tensor

    def rooms(self) -> list[Tensor]:
        """All memory that it takes."""
        return [room.tensor for room in self._rooms]

    def turn(self) -> tuple[Tensor, Tensor]:
        """What is owed, and where to put what will be, flat: in a step's first turn beside it, then in its place."""
        before, after = self.begin()._rooms[self._turned].tensor.view(-1), self._rooms[1].tensor.view(-1)
        self._turned = True
        return before, after

    def keep(self, places: Callable[[Tensor], Iterable[Tensor]]) -> None:
        """Go on to owe what was owed before the step, at these places: of what was sent there nothing was used."""
        if self._turned:
            for before, after in zip(*(places(room.tensor) for room in self._rooms), strict=True):
                after.copy_(before)

    def end_step(self, counts: bool, factor: float) -> None:
        """``factor``: how much larger gradients will be from now on, as a loss's scale has changed."""
        if counts and self._turned:
            self._rooms.reverse()
        if factor != 1 and self._rooms:
            self.now.mul_(factor)
        self._turned = False


def turn(owed: Owed | None) -> tuple[Tensor | None, Tensor | None]:
    """The same where nothing may be owed."""
    return (None, None) if owed is None else owed.turn()
