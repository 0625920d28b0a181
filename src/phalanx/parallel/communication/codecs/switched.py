"""``auto``: one of several methods, which may be another one from step to step.

Gradients lie so that any of them can encode them. What is owed when a method that owes is left is added to the
gradients of the next step, so that nothing of it is lost.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from phalanx.comm import EXACT
from phalanx.parallel.communication.codecs.codec import Codec
from phalanx.parallel.communication.codecs.owed import Owed
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.memory import Buffers
from phalanx.parallel.communication.peers import Expected
from phalanx.parallel.communication.pending import Pending


class Switched(Codec):
    """What is sent is exact until another method is chosen."""

    feedback = True
    owes_from_the_start = False

    def __init__(self, codecs: Mapping[str, Codec]) -> None:
        """``codecs``: by name; each one's block divides the largest."""
        self.codecs, self.name = codecs, EXACT
        self.block = max(codec.block for codec in codecs.values())
        self._settling = True
        """Something may be owed that the present method would not send: a saved state may have had it."""

    def choose(self, name: str) -> None:
        """Between two steps, on all ranks alike."""
        assert name == EXACT or name in self.codecs, name
        self._settling = self._settling or self._owes
        self.name = name

    @property
    def plain(self) -> bool:
        return self.name == EXACT

    @property
    def _owes(self) -> bool:
        """Whether the present method does."""
        return self.name != EXACT and self.codecs[self.name].feedback

    def settle(self) -> None:
        self._settling = True

    def end_step(self, counts: bool) -> None:
        if counts:
            self._settling = False

    def size(self, numbers: int, dtype: torch.dtype) -> int:
        return numbers * dtype.itemsize if self.name == EXACT else self.codecs[self.name].size(numbers, dtype)

    def encode(
        self, x: Tensor, out: Tensor, owed: Tensor | None = None, left: Tensor | None = None, at: int = 0
    ) -> None:
        self.codecs[self.name].encode(x, out, owed, left, at)

    def decode(self, rows: Tensor, out: Tensor, at: int = 0) -> None:
        self.codecs[self.name].decode(rows, out, at)

    def expect(self, group: Communicator, numbers: int, dtype: torch.dtype, buffers: Buffers) -> Expected | None:
        return None if self.name == EXACT else self.codecs[self.name].expect(group, numbers, dtype, buffers)

    def all_reduce(
        self, group: Communicator, x: Tensor, owed: Owed | None, owed_of_sums: Owed | None, buffers: Buffers,
        expected: Expected | None = None,
    ) -> Pending:  # fmt: skip
        if self._owes:
            return self.codecs[self.name].all_reduce(group, x, owed, owed_of_sums, buffers, expected)
        self._settle(owed, x)
        if self.name == EXACT:
            self._settle(owed_of_sums, x.view(group.size, -1)[group.rank])
            return group.all_reduce(x)
        settled = self._settled(owed_of_sums)
        return self.codecs[self.name].all_reduce(group, x, None, settled, buffers, expected)

    def reduce_scatter(
        self, group: Communicator, output: Tensor, parts: Tensor, owed: Owed | None, buffers: Buffers
    ) -> Pending:
        if self._owes:
            return self.codecs[self.name].reduce_scatter(group, output, parts, owed, buffers)
        self._settle(owed, parts.view(-1))
        if self.name == EXACT:
            return group.reduce_scatter(output, parts, buffers)
        return self.codecs[self.name].reduce_scatter(group, output, parts, None, buffers)

    def _settle(self, owed: Owed | None, numbers: Tensor) -> None:
        """Send what is owed with these, and owe nothing from then on."""
        if self._settling and owed is not None and owed.begun:
            before, after = owed.turn()
            numbers.add_(before)
            after.zero_()

    def _settled(self, owed: Owed | None) -> Owed | None:
        """The same of sums, which are not there yet."""
        return Settled(owed) if self._settling and owed is not None and owed.begun else None


class Settled(Owed):
    """What is owed is sent; what bytes then do not say is not owed."""

    def __init__(self, owed: Owed) -> None:
        self._owed = owed

    def turn(self) -> tuple[Tensor, Tensor]:
        before, after = self._owed.turn()
        after.zero_()
        return before, torch.empty_like(before)
