"""What ranks say to each other. Every collective of Phalanx goes through here, on a group named after a mesh axis."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.communication.arrivals import Arrivals
from phalanx.parallel.communication.exact import fold
from phalanx.parallel.communication.memory import Buffers

Group = dist.ProcessGroup
SMALL_BYTES = 1 << 18
MOST_BYTES = 1 << 24
"""Of the words that one rank can say at once."""
BEHIND = "neighbours"
"""The group that speaks behind the steps, while they go on."""

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


sent: Counter[tuple[str, str]] = Counter()
"""Bytes that this rank has had to send since the process began, by axis and kind: what a good algorithm sends, which is
what ours do, but for small messages that go to everybody at once."""


calls: Counter[tuple[str, str]] = Counter()
"""How many they were."""
signs: memoryview | list[int] = [0, 0, 0]
"""How many this rank has come to in all; how many more it has launched, which its GPU has yet to come to; whether its
main thread waits in one. A supervisor that must see it even in a frozen process lends the memory for it."""
watch: Callable[[str, str, Tensor], None] | None = None
"""Told of every message or collective, when it is launched: its axis, its kind, and what this rank brings."""


def _count(group: Group, kind: str, tensor: Tensor, share: float) -> None:
    if watch is not None:
        watch(group.group_desc, kind, tensor)
    if group.group_desc == BEHIND:
        return  # another thread's
    calls[group.group_desc, kind] += 1
    if tensor.is_cuda and isinstance(signs, memoryview):
        _arrivals.launching(signs)
    else:
        signs[0] += 1
    sent[group.group_desc, kind] += round(tensor.numel() * tensor.element_size() * share)


_arrivals = Arrivals()


@contextmanager
def _waiting() -> Iterator[None]:
    """While this rank's main thread can do nothing but wait for others."""
    main = threading.current_thread() is threading.main_thread()
    if main:
        signs[2] = 1
    try:
        yield
    finally:
        if main:
            signs[2] = 0


class Pending:
    """A collective on its way; `wait` returns once its result may be used.

    ``finish`` is done at its end, and may give another collective that belongs to it.
    """

    def __init__(self, works: Sequence[dist.Work], finish: Callable[[], Pending | None] | None = None) -> None:
        self._works, self._finish = works, finish
        self._following: Pending | None = None

    @property
    def over(self) -> bool:
        """Whether `wait` would return at once."""
        return self._finish is None and self._following is None and all(work.is_completed() for work in self._works)

    def advance(self) -> None:
        """Wait for what is on its way, and launch what follows it, if anything does."""
        works, self._works = self._works, ()
        if works:
            with _waiting():
                for work in works:
                    work.wait()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._following = finish()

    def wait(self) -> None:
        self.advance()
        if self._following is not None:
            self._following.wait()
            self._following = None


def all_reduce(tensor: Tensor, group: Group | None) -> Pending:
    """Sum over the group, in place; every rank gets the same bits."""
    if group is None:
        return Pending(())
    _count(group, "all-reduce", tensor, 2 * (group.size() - 1) / group.size())
    if not _exchanged(tensor, group):
        return Pending([dist.all_reduce(tensor, group=group, async_op=True)])
    work, rows = _exchange(tensor.expand(group.size(), *tensor.shape), group)

    def finish() -> None:
        fold(rows, tensor)

    return Pending([work], finish)


def all_reduce_exactly(tensor: Tensor, group: Group | None, buffers: Buffers) -> Pending:
    """Sum a flat tensor over the group, in place and by the tree, with the bytes of an ordinary all-reduce.

    Every rank sums its part of the elements, and then gives it to everybody, which is launched by `Pending.advance`.
    """
    if group is None or _exchanged(tensor, group):
        return all_reduce(tensor, group)
    ranks, size = group.size(), tensor.numel()
    _count(group, "all-reduce", tensor, 2 * (ranks - 1) / ranks)
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
        own = fold(rows, parts[group.rank()])
        buffers.give(rows)
        return Pending(_start_gather(parts, own, group), finish)

    return Pending([dist.all_to_all_single(rows, parts, group=group, async_op=True)], gather)


@_waiting()
def largest(tensor: Tensor, group: Group) -> None:
    """The largest over the group, in place, element by element."""
    _count(group, "all-reduce", tensor, 2 * (group.size() - 1) / group.size())
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)


def all_gather(output: Tensor, part: Tensor, group: Group) -> Pending:
    """Everybody's parts: row r of ``output``, which is ``[ranks, *part]``, is rank r's. ``part`` may be a row of it.

    gloo's own fills a second buffer of the whole and copies it; a broadcast a rank is faster (2 to 3x at 2 ranks, 1.7x
    at 8) and takes no memory.
    """
    _count(group, "all-gather", part, group.size() - 1)
    if not _exchanged(part, group):
        return Pending(_start_gather(output, part, group))
    work, rows = _exchange(part.expand(group.size(), *part.shape), group)

    def finish() -> None:
        output.copy_(rows)

    return Pending([work], finish)


def _start_gather(output: Tensor, part: Tensor, group: Group) -> list[dist.Work]:
    if dist.get_backend(group) != "gloo":
        return [_all_gather(output.view(-1), part.reshape(-1), group=group, async_op=True)]
    own = output[group.rank()]
    if own.data_ptr() != part.data_ptr():
        own.copy_(part)
    return [dist.broadcast(row, group=group, group_src=rank, async_op=True) for rank, row in enumerate(output)]


def reduce_scatter(
    output: Tensor, parts: Tensor, group: Group, buffers: Buffers | None = None, exactly: bool = False
) -> Pending:
    """The sum over the group of this rank's row of ``parts``, which is ``[ranks, *output]``.

    gloo's own sends a whole all-reduce, twice the bytes (here 2x slower at 2 ranks, 1.6x at 8), so on gloo the rows are
    exchanged and summed where they belong, by the tree; elsewhere if ``exactly``. ``output`` may be this rank's row.
    """
    _count(group, "reduce-scatter", output, group.size() - 1)
    if dist.get_backend(group) != "gloo" and not exactly:
        return Pending([_reduce_scatter(output.view(-1), parts.view(-1), group=group, async_op=True)])
    rows = buffers.take(*parts.shape, dtype=parts.dtype) if buffers else torch.empty_like(parts)

    def finish() -> None:
        fold(rows, output)
        if buffers:
            buffers.give(rows)

    return Pending([dist.all_to_all_single(rows, parts, group=group, async_op=True)], finish)


def send(tensor: Tensor, group: Group, to: int) -> Pending:
    """To a rank of the world that is in the group. A batch of one, for which NCCL makes no communicator of its own."""
    _count(group, "send", tensor, 1)
    return Pending(dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, to, group)]))


def receive(tensor: Tensor, group: Group, source: int) -> Pending:
    """From a rank of the world that is in the group."""
    if watch is not None:
        watch(group.group_desc, "receive", tensor)
    return Pending(dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, source, group)]))


@_waiting()
def broadcast(tensor: Tensor, group: Group, source: int) -> None:
    """What one rank of the group has, in place."""
    _count(group, "broadcast", tensor, group.rank() == source)
    dist.broadcast(tensor, group=group, group_src=source)


@_waiting()
def told(words: list[str], group: Group | None, source: int) -> list[str]:
    """What one rank of the group says."""
    if group is None:
        return words
    own = _spelled(words, group) if group.rank() == source else _spelled([], group)
    size = own.new_tensor([len(own)], dtype=torch.int64)
    dist.broadcast(size, group=group, group_src=source)
    letters = own if group.rank() == source else own.new_empty(_bounded(int(size)))
    dist.broadcast(letters, group=group, group_src=source)
    return _read(letters)


@_waiting()
def everybodys(words: list[str], group: Group | None) -> list[list[str]]:
    """What each rank of the group says."""
    if group is None:
        return [words]
    own = _spelled(words, group)
    sizes = own.new_empty(group.size(), dtype=torch.int64)
    _gather_now(sizes, own.new_tensor([len(own)], dtype=torch.int64), group)
    each = _bounded(int(sizes.max()))
    rows = own.new_empty(group.size(), each)
    _gather_now(rows, torch.cat([own, own.new_zeros(each - len(own))]), group)
    return [_read(row[:size]) for row, size in zip(rows.cpu(), sizes.tolist(), strict=True)]


def _spelled(words: list[str], group: Group) -> Tensor:
    """Words as bytes, where the group's collectives work. Not pickled: whoever unpickles runs what the sender likes."""
    letters = bytearray(json.dumps(words).encode())
    _bounded(len(letters))
    device = "cpu" if dist.get_backend(group) == "gloo" else torch.device("cuda", torch.cuda.current_device())
    return torch.frombuffer(letters, dtype=torch.uint8).to(device)


def _read(letters: Tensor) -> list[str]:
    words = json.loads(letters.cpu().numpy().tobytes())
    if not (isinstance(words, list) and all(isinstance(word, str) for word in words)):
        raise ValueError("a rank sent what is no list of words")
    return words


def _bounded(size: int) -> int:
    if not 0 < size <= MOST_BYTES:
        raise ValueError(f"a rank sends words of {size} bytes; there can be 1 to {MOST_BYTES}")
    return size


def _gather_now(output: Tensor, part: Tensor, group: Group) -> None:
    _all_gather(output.view(-1), part, group=group)


@_waiting()
def exchange(rows: Tensor, group: Group) -> Tensor:
    """Row r goes to rank r; what comes back holds row r from rank r."""
    _count(group, "exchange", rows, (group.size() - 1) / group.size())
    work, received = _exchange(rows, group)
    work.wait()
    return received


def exchange_lists(lists: Sequence[Sequence[Tensor]], like: Tensor, group: Group) -> list[Tensor]:
    """The tensors of list r go to rank r, flat, and as much comes back from it."""
    sizes = [sum(tensor.numel() for tensor in tensors) for tensors in lists]
    flat = [like.new_empty(0), *(tensor.reshape(-1) for tensors in lists for tensor in tensors)]
    return list(exchange_rows(torch.cat(flat), sizes, sizes, group).split(sizes))


@_waiting()
def exchange_rows(rows: Tensor, out: Sequence[int], back: Sequence[int], group: Group) -> Tensor:
    """So many rows go ``out`` to each rank in turn, and so many come ``back`` from each."""
    _count(group, "exchange", rows, 1 - out[group.rank()] / max(1, len(rows)))
    received = rows.new_empty(sum(back), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), list(back), list(out), group=group)
    return received


def _exchanged(part: Tensor, group: Group) -> bool:
    """On gloo, small messages go straight to everybody: its rings take a step a rank (18 ms for 3.6 at 8 ranks)."""
    return dist.get_backend(group) == "gloo" and part.numel() * part.element_size() * group.size() <= SMALL_BYTES


def _exchange(parts: Tensor, group: Group) -> tuple[dist.Work, Tensor]:
    """Row r goes to rank r; what comes back holds row r from rank r."""
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    return dist.all_to_all_single(received, parts, group=group, async_op=True), received
