"""Memory that is given back: rooms that empty and fill again under the same tensor, and buffers lent in turn.

On a GPU torch's caching allocator does this well. On a CPU the C library's heap does not: large blocks that come and go
between small ones leave holes, and a rank that should hold a quarter of a model held five times that. So on a CPU large
rooms are pages of their own, and buffers are lent again and again.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

LARGE_BYTES = 1 << 18


def pin(address: int, size: int) -> bool:
    """Have a GPU copy from and to memory by itself, some twenty times as fast as through a buffer of the driver's."""
    if int(torch.cuda.cudart().cudaHostRegister(address, size, 0)):
        warnings.warn(f"{size:,} bytes could not be pinned: copies between GPU and host will be slow", stacklevel=3)
        return False
    return True


def unpin(address: int) -> None:
    """Before this process lets go of it."""
    torch.cuda.cudart().cudaHostUnregister(address)


class Pages(mmap.mmap):
    """Memory of its own."""

    pinned_at: int | None = None
    pinned_by: int = 0
    """The process that did."""

    @classmethod
    def of(cls, size: int) -> Pages:
        pages = cls(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)  # a page fault for 2 MiB instead of 512
        return pages

    def pin(self, address: int) -> None:
        """For a device's copies. What this process forks does not have it: a device writes to one copy alone."""
        if pin(address, len(self)):
            self.pinned_at, self.pinned_by = address, os.getpid()
            self.madvise(mmap.MADV_DONTFORK)

    def __del__(self) -> None:
        if self.pinned_at is not None and self.pinned_by == os.getpid():
            unpin(self.pinned_at)


class Room:
    """A tensor whose memory can be let go and had again. Who saved the tensor sees what is put there later."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, reader: torch.device | None = None
    ) -> None:
        """``reader``: a device that it travels to again and again."""
        count = torch.Size(shape).numel()
        self.bytes = count * dtype.itemsize
        self._pages: Pages | None = None
        pinned = device.type == "cpu" and reader is not None and reader.type == "cuda"
        if device.type == "cpu" and self.bytes >= LARGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            self._pages = Pages.of(self.bytes)
            self.tensor = torch.frombuffer(self._pages, dtype=dtype, count=count).view(*shape)
            if pinned:
                self._pages.pin(self.tensor.data_ptr())
        else:
            self.tensor = torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)

    def empty(self) -> None:
        """Let the memory go."""
        if self._pages is not None:
            assert self._pages.pinned_at is None, "a device would keep writing to what was there"
            self._pages.madvise(mmap.MADV_DONTNEED)
        else:
            self.tensor.untyped_storage().resize_(0)

    def open(self) -> None:
        """Have memory again, with anything in it."""
        if self._pages is None and not self.tensor.untyped_storage().size():
            self.tensor.untyped_storage().resize_(self.bytes)


class Buffers:
    """Memory for what passes through, lent and given back; on a CPU it is kept for the next who asks."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: dict[int, list[Room]] = {}
        """By size."""
        self._lent: dict[int, Room] = {}
        self._lock = threading.Lock()
        """Threads that end exchanges give back what they were made in."""

    def take(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor with anything in it."""
        if self.device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=self.device)
        count = math.prod(shape)
        size = count * dtype.itemsize
        with self._lock:
            lent = (room := self._free_room(max(size, LARGE_BYTES))).tensor[:size].view(dtype).view(shape)
            if count:  # an empty tensor has no address to know it by
                self._lent[lent.data_ptr()] = room
        return lent

    def _free_room(self, size: int) -> Room:
        """A free room of at most twice the size; if none is large enough, a new one in place of one half as large."""
        if rooms := self._free.get(size):
            return rooms.pop()
        alike = sorted(own for own, rooms in self._free.items() if rooms and size / 2 <= own <= 2 * size)
        fitting = [own for own in alike if own >= size]
        room = self._free[fitting[0] if fitting else alike[-1]].pop() if alike else None
        return room if room is not None and fitting else Room((size,), torch.uint8, self.device)

    def give(self, tensor: Tensor) -> None:
        """Nobody reads it any more."""
        if self.device.type == "cpu" and tensor.numel():
            with self._lock:
                room = self._lent.pop(tensor.data_ptr())
                self._free.setdefault(room.bytes, []).append(room)
