"""A communicator: the ranks along an axis of the mesh, and every collective among them.

Nothing else in Phalanx calls torch.distributed's collectives. So whatever concerns all of them is here: how they are
counted and watched, which algorithm is the best on a backend, and how what is sent is made small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.communication import words as spelling
from phalanx.parallel.communication.background import Background
from phalanx.parallel.communication.exact import fold
from phalanx.parallel.communication.host_sums import HostSums, in_two_ways
from phalanx.parallel.communication.launched import Launched
from phalanx.parallel.communication.memory import Buffers
from phalanx.parallel.communication.peers import Expected, Peers
from phalanx.parallel.communication.pending import Pending
from phalanx.parallel.communication.traffic import Traffic

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Communicator:
    """What this rank says to the others along an axis. On an axis where it is alone, nothing is sent."""

    small_bytes = 1 << 18
    """On gloo, messages of up to so many bytes go straight to everybody: its rings take a step a rank (18 ms for 3.6 at
    8 ranks)."""

    def __init__(
        self, group: dist.ProcessGroup | None, traffic: Traffic, name: str = "alone", hosts: Sequence[int] = ()
    ) -> None:
        """``name``: the axis in logs, errors and counts, where the group does not say it.

        ``hosts``: of each rank, where that is known; neighbours are on the same.
        """
        self.traffic, self._group = traffic, group
        self.name = name if group is None else group.group_desc
        self._own_name = "" if group is None else group.group_name
        self.handle = ""
        """What compiled programs know it by (`operators`)."""
        self.alone = group is None
        self.rank: int = 0 if group is None else group.rank()
        self.size: int = 1 if group is None else group.size()
        backend = "gloo" if group is None else dist.get_backend(group)
        self._gloo, self._nccl = backend == "gloo", backend == "nccl"
        self._peers = Peers(group, hosts) if group is not None and self._gloo else None
        self._hosts = HostSums(self._peers, hosts) if self._peers is not None and in_two_ways(hosts) else None
        self.hosts_first = self._hosts is not None
        self._sums = self._hosts
        """For sums of all, the same or over several connections (`connect`)."""
        self._background = Background(self.name)

    @property
    def members(self) -> list[int]:
        """Their ranks in the world."""
        return [0] if self._group is None else dist.get_process_group_ranks(self._group)

    def __repr__(self) -> str:
        return f"Communicator({self.name}, rank {self.rank} of {self.size})"

    def all_reduce(self, tensor: Tensor, expected: Expected | None = None) -> Pending:
        """Sum over the ranks, in place; every rank gets the same bits. ``expected``: where theirs are to come."""
        if self.alone:
            return Pending()
        waiting = self._count("all-reduce", tensor, self._both_ways)
        if expected is None and not self._is_small(tensor):
            if self._sums is not None and tensor.numel() >= self._sums.least:
                return self._sums.all_reduce(tensor, partial(self._background.take, waiting=waiting))
            return Pending([dist.all_reduce(tensor, group=self._group, async_op=True)], None, waiting)
        every = tensor.expand(self.size, *tensor.shape)
        if expected is not None:
            works, rows = expected.send(every), expected.rows
            rows[self.rank].copy_(tensor)
        else:
            work, rows = self._start_all_to_all(every)
            works = [work]

        def finish() -> None:
            fold(rows, tensor)

        return Pending(works, finish, waiting)

    def expect(self, rows: Tensor) -> Expected:
        """Row r of an `exchange` or a small sum to come from rank r, which need not wait for this rank's word then.

        All must expect in the same order; see `expects`.
        """
        assert self._peers is not None
        return self._peers.expect(rows)

    @property
    def expects(self) -> bool:
        """Whether something is gained by it: on gloo, whose messages wait for a word that their receiver is ready."""
        return self._peers is not None

    def all_reduce_exactly(self, tensor: Tensor, buffers: Buffers) -> Pending:
        """Sum a flat tensor over the ranks, in place and by the tree, with the bytes of an ordinary all-reduce.

        Every rank sums its part of the elements, and then gives it to all, which is launched by `Pending.advance`.
        """
        if self.alone or self._is_small(tensor):
            return self.all_reduce(tensor)
        ranks, size = self.size, tensor.numel()
        waiting = self._count("all-reduce", tensor, self._both_ways)
        if self._sums is not None and self._sums.by_tree and size >= self._sums.least:
            return self._sums.all_reduce(tensor, partial(self._background.take, waiting=waiting))
        each = -(-size // ranks)
        even = size == each * ranks
        parts = tensor.view(ranks, each) if even else buffers.take(ranks, each, dtype=tensor.dtype)
        if not even:
            parts.view(-1)[:size].copy_(tensor)
            parts.view(-1)[size:].zero_()
        rows = buffers.take(ranks, each, dtype=tensor.dtype)

        def finish() -> None:
            if not even:
                tensor.copy_(parts.view(-1)[:size])
                buffers.give(parts)

        def gather() -> Pending:
            own = fold(rows, parts[self.rank])
            buffers.give(rows)
            return Pending(self._start_all_gather(parts, own), finish, waiting)

        return Pending(self._start_exchange(rows, parts), gather, waiting)

    def all_reduce_max(self, tensor: Tensor) -> None:
        """The largest over the ranks, in place, element by element."""
        if self.alone:
            return
        with self._count("all-reduce", tensor, self._both_ways):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)

    def all_gather(self, output: Tensor, part: Tensor) -> Pending:
        """Everybody's parts: row r of ``output``, ``[ranks, *part]``, is rank r's. ``part`` may be a row of it.

        gloo's own fills a second buffer of the whole and copies it, and broadcasts, one a rank, use a link one way at a
        time (see `peers`).
        """
        if self.alone:
            output[0].copy_(part)
            return Pending()
        waiting = self._count("all-gather", part, self.size - 1)
        if (hosts := self._hosts_for(part)) is not None:
            return self.in_background(hosts.all_gather(output, part), waiting)
        if not self._is_small(part):
            return Pending(self._start_all_gather(output, part), None, waiting)
        work, rows = self._start_all_to_all(part.expand(self.size, *part.shape))

        def finish() -> None:
            output.copy_(rows)

        return Pending([work], finish, waiting)

    def gathered(self, own: Tensor) -> Tensor:
        """What every rank brings, ``[ranks, *own]``, now."""
        every = own.new_empty(self.size, *own.shape)
        self.all_gather(every, own.contiguous()).wait()
        return every

    def reduce_scatter(
        self, output: Tensor, parts: Tensor, buffers: Buffers | None = None, exactly: bool = False
    ) -> Pending:
        """The sum over the ranks of this rank's row of ``parts``, which is ``[ranks, *output]``.

        gloo's own sends a whole all-reduce, twice the bytes (here 2x slower at 2 ranks, 1.6x at 8), so on gloo the rows
        are exchanged and summed where they belong, by the tree; elsewhere if ``exactly``. ``output`` may be this rank's
        row.
        """
        if self.alone:
            output.copy_(parts[0])
            return Pending()
        waiting = self._count("reduce-scatter", output, self.size - 1)
        if not self._gloo and not exactly:
            work = _reduce_scatter(output.view(-1), parts.view(-1), group=self._group, async_op=True)
            return Pending([work], None, waiting)
        if (hosts := self._hosts_for(output)) is not None and (hosts.by_tree or not exactly):
            return self.in_background(hosts.reduce_scatter(output, parts, buffers), waiting)
        rows = buffers.take(*parts.shape, dtype=parts.dtype) if buffers else torch.empty_like(parts)

        def finish() -> None:
            fold(rows, output)
            if buffers:
                buffers.give(rows)

        return Pending(self._start_exchange(rows, parts), finish, waiting)

    def all_to_all(self, rows: Tensor) -> Tensor:
        """Row r goes to rank r; what comes back holds row r from rank r."""
        if self.alone:
            return rows
        with self._count("all-to-all", rows, (self.size - 1) / self.size):
            work, received = self._start_all_to_all(rows)
            work.wait()
        return received

    def exchange(self, received: Tensor, rows: Tensor, expected: Expected | None = None) -> Pending:
        """Row r goes to rank r, and row r of ``received``, which may be what is ``expected``, comes from it."""
        waiting = self._count("all-to-all", rows, (self.size - 1) / self.size)
        return Pending(self._start_exchange(received, rows, expected), None, waiting)

    def prepared_all_gather(self, output: Tensor) -> tuple[Callable[[], Pending], Launched]:
        """An all-gather of the rows of ``output``: launched by what is returned, once this rank's own row is there.

        On gloo any thread may do so, and has the others' rows waited for from now on: no word that this rank is ready
        has to pass a slow link between its row and theirs. What else is returned is for `in_background`.
        """
        waiting = self._count("all-gather", output[self.rank], self.size - 1)
        peers = self._peers
        if peers is None:
            return lambda: Pending(self._start_all_gather(output, output[self.rank]), None, waiting), waiting
        if (hosts := self._hosts_for(output[self.rank])) is not None:
            return hosts.prepared_all_gather(output), waiting
        expected, own = peers.expect(output), output[self.rank].expand(self.size, -1)
        return lambda: Pending(expected.send(own)), waiting

    def reserved_all_gather(self, part: Tensor) -> tuple[Callable[[Tensor, Tensor], Pending], Launched]:
        """An `all_gather` of parts like this one, counted now and launched later; on gloo any thread may do so.

        Whatever else is launched before it is, ranks find each other. What else is returned is for `in_background`.
        """
        waiting = self._count("all-gather", part, self.size - 1)
        if (hosts := self._hosts_for(part)) is not None:
            return hosts.reserved_all_gather(), waiting
        number = None if self._peers is None else self._peers.number()
        return lambda output, part: Pending(self._start_all_gather(output, part, number)), waiting

    def in_background(self, pending: Pending, waiting: Launched) -> Pending:
        """On gloo: an exchange goes on, hop by hop, while this rank computes. Elsewhere a GPU sees to that.

        ``waiting`` is entered while this rank waits for it.
        """
        return pending if self._peers is None else self._background.take(pending, waiting)

    def all_to_all_rows(self, rows: Tensor, out: Sequence[int], back: Sequence[int]) -> Tensor:
        """So many rows go ``out`` to each rank in turn, and so many come ``back`` from each."""
        if self.alone:
            return rows
        received = rows.new_empty(sum(back), *rows.shape[1:])
        with self._count("all-to-all", rows, 1 - out[self.rank] / max(1, len(rows))):
            dist.all_to_all_single(received, rows.contiguous(), list(back), list(out), group=self._group)
        return received

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """What one rank has, in place."""
        if self.alone:
            return
        with self._count("broadcast", tensor, self.rank == source):
            dist.broadcast(tensor, group=self._group, group_src=source)

    def send(self, tensor: Tensor, to: int) -> Pending:
        """To a rank of the world that is among these. A batch of one: NCCL makes no communicator of its own for it."""
        waiting = self._count("send", tensor, 1)
        return Pending(dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, to, self._group)]), None, waiting)

    def receive(self, tensor: Tensor, source: int) -> Pending:
        """From a rank of the world that is among these."""
        waiting = self._recorded("receive", tensor)
        return Pending(dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, source, self._group)]), None, waiting)

    def broadcast_words(self, words: list[str], source: int = 0) -> list[str]:
        """What one rank says."""
        if self.alone:
            return words
        own = spelling.spelled(words if self.rank == source else [], self._words_device)
        size = own.new_tensor([len(own)], dtype=torch.int64)
        with self._recorded("words", own):
            dist.broadcast(size, group=self._group, group_src=source)
            letters = own if self.rank == source else own.new_empty(spelling.bounded(int(size)))
            dist.broadcast(letters, group=self._group, group_src=source)
        return spelling.read(letters)

    def all_gather_words(self, words: list[str]) -> list[list[str]]:
        """What each rank says."""
        if self.alone:
            return [words]
        own = spelling.spelled(words, self._words_device)
        sizes = own.new_empty(self.size, dtype=torch.int64)
        with self._recorded("words", own):
            _all_gather(sizes, own.new_tensor([len(own)], dtype=torch.int64), group=self._group)
            each = spelling.bounded(int(sizes.max()))
            rows = own.new_empty(self.size, each)
            _all_gather(rows.view(-1), torch.cat([own, own.new_zeros(each - len(own))]), group=self._group)
        return [spelling.read(row[:size]) for row, size in zip(rows.cpu(), sizes.tolist(), strict=True)]

    def connect(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Further groups of these ranks, on gloo (`connections`). Sums of two ranks take them too, to the same bits."""
        assert self._peers is not None
        self._peers.connect(groups)
        self._sums = HostSums(self._peers, range(2)) if self.size == 2 else self._sums

    def close(self) -> None:
        """Take the process group apart."""
        self._background.close()
        if self._peers is not None:
            self._peers.close()
        if self._group is not None:
            dist.destroy_process_group(self._group)

    @property
    def _both_ways(self) -> float:
        return 2 * (self.size - 1) / self.size

    @property
    def _words_device(self) -> torch.device | str:
        """Where the group's collectives work."""
        return torch.device("cuda", torch.cuda.current_device()) if self._nccl else "cpu"

    def _count(self, kind: str, tensor: Tensor, share: float) -> Launched:
        """A collective is launched, and counted."""
        return self.traffic.launched(self._own_name, self.name, self.size, kind, tensor, share)

    def _recorded(self, kind: str, tensor: Tensor) -> Launched:
        """One that its sender counts, or nobody."""
        return self.traffic.recorded(self._own_name, self.name, self.size, kind, tensor)

    def _is_small(self, part: Tensor) -> bool:
        return self._gloo and part.numel() * part.element_size() * self.size <= self.small_bytes

    def _hosts_for(self, part: Tensor) -> HostSums | None:
        """Where parts like this one go inside of hosts and between them."""
        return None if self._is_small(part) else self._hosts

    def _start_all_gather(self, output: Tensor, part: Tensor, number: int | None = None) -> list[dist.Work]:
        if self._peers is None:
            return [_all_gather(output.view(-1), part.reshape(-1), group=self._group, async_op=True)]
        own = output[self.rank]
        if own.data_ptr() != part.data_ptr():
            own.copy_(part)
        return self._peers.expect(output, number).send(own.expand(self.size, *own.shape))

    def _start_exchange(self, received: Tensor, rows: Tensor, expected: Expected | None = None) -> list[dist.Work]:
        if self._peers is None:
            return [dist.all_to_all_single(received, rows, group=self._group, async_op=True)]
        works = (expected or self._peers.expect(received)).send(rows)
        received[self.rank].copy_(rows[self.rank])
        return works

    def _start_all_to_all(self, parts: Tensor) -> tuple[dist.Work, Tensor]:
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        return dist.all_to_all_single(received, parts, group=self._group, async_op=True), received
