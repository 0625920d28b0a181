"""``topk:P``: of every block the largest P percent, as they are, and where they lie. The rest is owed.

Everybody gives them to everybody, so that bytes grow with the ranks: it is for few of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.parallel.communication.codecs.codec import Codec
from phalanx.parallel.communication.codecs.owed import Owed, turn
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.memory import Buffers
from phalanx.parallel.communication.peers import Expected
from phalanx.parallel.communication.pending import Pending


class TopK(Codec):
    """Bytes are the numbers of all blocks, and then two for each of them: its place in the block."""

    block, feedback, two_hops = 1024, True, False

    def __init__(self, percent: float) -> None:
        self.kept = max(1, round(self.block * percent / 100))

    def size(self, numbers: int, dtype: torch.dtype) -> int:
        return (
            -(-numbers // self.block * self.kept * (dtype.itemsize + 2) // 8) * 8
        )  # where rows can be read as numbers

    def encode(
        self, x: Tensor, out: Tensor, owed: Tensor | None = None, left: Tensor | None = None, at: int = 0
    ) -> None:
        rows = (x if owed is None else x + owed).view(-1, self.block)
        places = rows.abs().topk(self.kept, 1, sorted=False).indices
        numbers, where = self._parts(out, x)
        numbers.copy_(rows.gather(1, places))
        where.copy_(places)
        if left is not None:
            left.view(rows.shape).copy_(rows).scatter_(1, places, 0)

    def decode(self, rows: Tensor, out: Tensor, at: int = 0) -> None:
        out.zero_()
        for row in rows:
            numbers, where = self._parts(row, out)
            out.view(-1, self.block).scatter_add_(1, where.long(), numbers)

    def _parts(self, row: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Of a row of bytes of so many numbers: those that are sent, and their places, by block."""
        count = like.numel() // self.block * self.kept
        wide = count * like.dtype.itemsize
        places = row[wide : wide + 2 * count].view(torch.int16)
        return row[:wide].view(like.dtype).view(-1, self.kept), places.view(-1, self.kept)

    def sent(self, numbers: int, dtype: torch.dtype, ranks: int) -> dict[str, int]:
        return {"all-gather": self.size(numbers, dtype) * (ranks - 1)}

    def all_reduce(
        self, group: Communicator, x: Tensor, owed: Owed | None, owed_of_sums: Owed | None, buffers: Buffers,
        expected: Expected | None = None,
    ) -> Pending:  # fmt: skip
        rows = buffers.take(group.size, self.size(x.numel(), x.dtype), dtype=torch.uint8)
        self.encode(x, rows[group.rank], *turn(owed))
        launch, waiting = group.prepared_all_gather(rows)
        pending = launch()

        def finish() -> None:
            pending.wait()
            self.decode(rows, x)
            buffers.give(rows)

        return group.in_background(Pending((), finish), waiting)
