"""What a codec is: numbers to bytes and back, and how ranks sum gradients and gather weights with them.

Ranks sum in two hops. Each encodes what it has and gives every rank the bytes of that rank's part; who has a part
decodes everybody's, adds them up in the width of gradients, and encodes the sum for all. Every rank decodes the same
bytes, its own among them: so replicas stay the same to the last bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.parallel.communication.codecs.owed import Owed, turn
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.memory import Buffers
from phalanx.parallel.communication.peers import Expected
from phalanx.parallel.communication.pending import Pending


class Method:
    """How gradients are made small. It keeps nothing: what is to be kept of a bucket is in its `Owed`."""

    block = 1
    """Numbers are encoded in runs of so many."""
    feedback = False
    """Whether what was not sent is owed, and added to what is sent next."""

    owes_from_the_start = True
    """Whether memory for that is taken at the start, or when something is first owed."""
    two_hops = True
    """Whether sums are encoded again, so that something of them may be owed."""

    @property
    def plain(self) -> bool:
        """Whether numbers are sent as they are just now."""
        return False

    def takes(self, shape: torch.Size) -> bool:
        """Whether it is for gradients of weights of which each rank owns up to so much; others travel as they are."""
        return True

    def settle(self) -> None:
        """A saved state has been taken up, and what was owed with it."""

    def end_step(self, counts: bool) -> None:
        """After a step; ``counts``: of all that was owed what was sent is used."""


class Codec(Method, ABC):
    """One by which any numbers become bytes."""

    @abstractmethod
    def size(self, numbers: int, dtype: torch.dtype) -> int:
        """Bytes that so many numbers become."""

    @abstractmethod
    def encode(
        self, x: Tensor, out: Tensor, owed: Tensor | None = None, left: Tensor | None = None, at: int = 0
    ) -> None:
        """Flat numbers, and what is ``owed`` of them, to flat bytes; what those do not say is ``left``.

        ``at``: where in a row of gradients they begin.
        """

    @abstractmethod
    def decode(self, rows: Tensor, out: Tensor, at: int = 0) -> None:
        """The sum over the first dim of what ``rows`` of bytes say, in this order, into flat numbers."""

    def for_rows(self, counts: Callable[[], Tensor]) -> Codec:
        """The same, for rows in which so many first numbers of each block are gradients, the rest being zeros."""
        return self

    def sent(self, numbers: int, dtype: torch.dtype, ranks: int) -> dict[str, int]:
        """By kind, the bytes that a rank sends for a sum of so many numbers."""
        each = self.size(numbers, dtype) * (ranks - 1) // ranks
        return {"all-to-all": each, "all-gather": each}

    def expect(self, group: Communicator, numbers: int, dtype: torch.dtype, buffers: Buffers) -> Expected | None:
        """Say beforehand that this rank is ready for the first hop of a sum of so many."""
        if not group.expects or not self.two_hops:
            return None
        rows = buffers.take(group.size, self.size(numbers // group.size, dtype), dtype=torch.uint8)
        return group.expect(rows)

    def all_reduce(
        self, group: Communicator, x: Tensor, owed: Owed | None, owed_of_sums: Owed | None, buffers: Buffers,
        expected: Expected | None = None,
    ) -> Pending:  # fmt: skip
        """Sum flat numbers over the ranks, in place; the second hop is launched by `Pending.advance`.

        ``expected``: where the first comes, if it is.
        """
        parts = x.view(group.size, -1)
        shape = group.size, self.size(parts.shape[1], x.dtype)
        received = buffers.take(*shape, dtype=torch.uint8) if expected is None else expected.rows
        sent, sums = (buffers.take(*shape, dtype=torch.uint8) for _ in range(2))
        self.encode(x, sent.view(-1), *turn(owed))
        first, own = group.exchange(received, sent, expected), parts[group.rank]
        at = group.rank * len(own)
        launch, waiting = group.prepared_all_gather(sums)

        def gather() -> Pending:
            first.wait()
            self.decode(received, own, at)
            self.encode(own, sums[group.rank], *turn(owed_of_sums), at)
            second = launch()
            buffers.give(received)
            buffers.give(sent)
            return Pending((), _Last(self, second, sums, x, buffers))

        return group.in_background(Pending((), gather), waiting)

    def reduce_scatter(
        self, group: Communicator, output: Tensor, parts: Tensor, owed: Owed | None, buffers: Buffers
    ) -> Pending:
        """The sum over the ranks of this rank's row of ``parts``, ``[ranks, numbers]``."""
        sent = buffers.take(group.size, self.size(parts.shape[1], parts.dtype), dtype=torch.uint8)
        received = buffers.take(*sent.shape, dtype=torch.uint8)
        self.encode(parts.view(-1), sent.view(-1), *turn(owed))
        pending = group.exchange(received, sent)

        def finish() -> None:
            pending.wait()
            self.decode(received, output)
            buffers.give(sent)
            buffers.give(received)

        return Pending((), finish)

    def all_gather(
        self, group: Communicator, output: Tensor, row: Tensor, buffers: Buffers,
        gather: Callable[[Tensor, Tensor], Pending] | None = None,
    ) -> Pending:  # fmt: skip
        """Everybody's rows, ``[ranks, numbers]``, this rank's own as all others see it.

        ``gather``: one of bytes that was reserved, if any was.
        """
        sent = buffers.take(group.size, self.size(row.numel(), row.dtype), dtype=torch.uint8)
        self.encode(row, sent[group.rank])
        pending = (gather or group.all_gather)(sent, sent[group.rank])
        return Pending((), _Last(self, pending, sent, output.view(-1), buffers))


class _Last:
    """The end of an exchange: bytes that everybody has become numbers."""

    def __init__(self, codec: Codec, pending: Pending, sent: Tensor, output: Tensor, buffers: Buffers) -> None:
        self.codec, self.pending, self.sent, self.output, self.buffers = codec, pending, sent, output, buffers

    def __call__(self) -> None:
        self.pending.wait()
        self.codec.decode(self.sent.view(1, -1), self.output)
        self.buffers.give(self.sent)
