"""How this rank's activations are sharded: a value, handed on from the first block of a micro-batch to its last.

The value is made where the stream enters the first block (`blocks.boundary`). Whoever computes with a part of an
activation, or draws random numbers for one, asks it which part that is. Recomputing a block hands it the same value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor

from phalanx.errors import WrongUse


@dataclass(frozen=True, eq=False)
class ActivationLayout:
    """Which part of a sample's activations is here: by coordinates in the whole, or None for all.

    Activations are ``[time, ..., features]``, attention scores ``[heads, time, time]``.
    """

    length: int = 0
    """Of whole sequences, where ranks hold parts of them."""
    positions: Tensor | None = None
    """Of a sequence, those that this rank of ``cp`` holds."""
    time: Tensor | None = None
    """Those that an activation has here: the ``positions``, or this rank of ``tp``'s shard of them."""
    features: Tensor | None = None
    heads: Tensor | None = None

    @property
    def held(self) -> int:
        """How many positions this rank of ``cp`` holds, together with the others of its ``tp`` group."""
        return self.length if self.positions is None else len(self.positions)

    def inside(self, features: Tensor | None, heads: Tensor | None) -> ActivationLayout:
        """Between column- and row-parallel linears: gathered over the sequence, sharded by features and heads."""
        return replace(self, time=self.positions, features=features, heads=heads)

    def grid(self, inner: Sequence[int]) -> Sequence[int | Tensor]:
        """The coordinates in the whole of a sample's grid of this shape here."""
        if self.time is None and self.features is None and self.heads is None:
            return inner
        if all(size == 1 for size in inner):
            return inner  # one for a sample
        in_time = self.time is not None and [len(self.time)] == list(inner[1:2])
        scores = len(inner) == 3 and (self.heads is not None or in_time)
        dims = {0: self.heads, 1: self.time} if scores else {0: self.time, -1: self.features}
        found: list[int | Tensor] = list(inner)
        for dim, places in dims.items():
            if places is None or (len(inner) > 1 and inner[dim] == 1 != len(places)):
                continue  # whole here, or one for all of them
            if len(inner) < 2 or inner[dim] != len(places):
                raise WrongUse(
                    f"a draw of {tuple(inner)} for each sample, where {len(places)} of dim {dim} are on this rank: "
                    "its place in the whole cannot be told. Draw for [batch, time, width], or leave tp and cp out."
                )
            found[dim] = places
        return found


WHOLE = ActivationLayout()


class Activations:
    """The layout of what is computed just now."""

    def __init__(self) -> None:
        self._stream = WHOLE
        self._inner: ActivationLayout | None = None

    @property
    def stream(self) -> ActivationLayout:
        """Of the residual stream."""
        return self._stream

    @property
    def layout(self) -> ActivationLayout:
        """Of an activation here: the stream's, or that of what lies between column- and row-parallel linears."""
        return self._inner or self._stream

    def enter(self, layout: ActivationLayout) -> None:
        """From here to the last block, the stream is sharded."""
        self._stream = layout

    def leave(self) -> None:
        """After the last block: whole sequences."""
        self._stream = ActivationLayout(self._stream.length)

    def turn_inside(self, layout: ActivationLayout) -> None:
        """From here on, activations are not the stream's."""
        self._inner = layout

    def turn_outside(self) -> None:
        """Back to the stream."""
        self._inner = None

    def handing(self) -> tuple[ActivationLayout, ActivationLayout | None]:
        """What activations have now, to be given to `handed` later."""
        return self._stream, self._inner

    def hand(
        self, stream: ActivationLayout, inner: ActivationLayout | None = None
    ) -> tuple[ActivationLayout, ActivationLayout | None]:
        """From here on, activations have this layout. Gives what they had, to be handed back."""
        before = self._stream, self._inner
        self._stream, self._inner = stream, inner
        return before

    @contextmanager
    def handed(self, stream: ActivationLayout, inner: ActivationLayout | None = None) -> Iterator[None]:
        """While this lasts, activations have this layout."""
        before = self.hand(stream, inner)
        try:
            yield
        finally:
            self.hand(*before)
