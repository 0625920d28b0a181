"""Slots: memory that outlives a rank, each for one staged copy of its state, which describes itself.

The host's supervisor makes the memory before it forks the ranks and holds on to it, so that a rank that is killed
leaves its last copies behind. A slot is whole or it is not used: its condition is the last thing that staging writes.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.state import Entry
from phalanx.parallel.communication.memory import pin, unpin
from phalanx.parallel.weights.boxes import Box

HEADER, CONDITION = struct.Struct("8sqqqq"), struct.Struct("q")
MAGIC = b"phalanx1"
ALIGN = 64
ROUND = 1 << 20
EMPTY, STAGING, WHOLE = range(3)


@dataclass(frozen=True)
class StagedEntry:
    """Where an entry lies in a slot."""

    name: str
    box: Box
    shape: tuple[int, ...]
    dtype: str
    start: int
    written: bool


@dataclass(frozen=True)
class Staged:
    """A whole copy of a rank's state, as it lies in a slot."""

    facts: dict[str, Any]
    numbers: dict[str, Any]
    tensors: list[tuple[StagedEntry, Tensor]]

    @property
    def step(self) -> int:
        return self.facts["step"]


def new_memory() -> int:
    """A file descriptor of memory without a name: it is gone when the last process that has it is."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("phalanx")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def free_memory() -> int | None:
    """Bytes of this host's memory, or of what this process may use of it, that are free; None where nobody says."""
    found = []
    with suppress(OSError, ValueError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(1024 * int(lines["MemAvailable"].split()[0]))
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(stat.get("inactive_file", 0))  # that can be dropped
        found.append(int((group / "memory.max").read_text()) - used)
    return min(found, default=None)


class Slot:
    """One slot, over a file descriptor of `new_memory` or, without one, over memory of this process."""

    def __init__(self, memory: int | None = None) -> None:
        self._own = memory is None
        self.memory = new_memory() if memory is None else memory
        self._map: mmap.mmap | None = None
        self.pinned = False
        """Whether a GPU's copies come here."""
        self._pinned_at: int | None = None
        self._laid: list[tuple[Any, ...]] | None = None
        self.places: list[StagedEntry] = []
        self._end = ALIGN

    def _open(self, size: int) -> mmap.mmap:
        """The memory, at least so large."""
        if self._map is None or len(self._map) < size:
            there = os.fstat(self.memory).st_size
            if there < size:
                there = (-(-size // ROUND) + 1) * ROUND  # with room for the words at the end to grow
                os.ftruncate(self.memory, there)
            self.unpin()
            self._map = mmap.mmap(self.memory, there)
            if self.pinned:
                self._pin()
        return self._map

    def _pin(self) -> None:
        """For a GPU's copies."""
        memory = torch.frombuffer(self._map, dtype=torch.uint8)
        if pin(memory.data_ptr(), len(memory)):
            self._pinned_at = memory.data_ptr()

    def unpin(self) -> None:
        """Before this process lets go of it."""
        if self._pinned_at is not None:
            unpin(self._pinned_at)
            self._pinned_at = None

    def lay_out(self, entries: Sequence[Entry]) -> list[Tensor]:
        """Where each entry's copy goes. Until `seal` there is nothing in this slot."""
        known = [(e.name, e.box, e.value.dtype, e.written) for e in entries]
        if known != self._laid:
            self._laid, self.places, start = known, [], ALIGN
            for entry in entries:
                dtype = str(entry.value.dtype).removeprefix("torch.")
                self.places.append(StagedEntry(entry.name, entry.box, entry.shape, dtype, start, entry.written))
                start += -(-entry.value.numel() * entry.value.element_size() // ALIGN) * ALIGN
            self._end = start
        self._mark(STAGING)
        return [self._tensor(place) for place in self.places]

    def _mark(self, condition: int, step: int = -1, length: int = 0) -> None:
        memory = self._open(max(HEADER.size, self._end + length))
        HEADER.pack_into(memory, 0, MAGIC, STAGING, step, self._end, length)
        CONDITION.pack_into(memory, len(MAGIC), condition)  # last, and at once: a kill may come between any two writes

    def _tensor(self, place: StagedEntry) -> Tensor:
        assert self._map is not None
        dtype, count = getattr(torch, place.dtype), math.prod(place.box.sizes)
        if not count:
            return torch.empty(place.box.sizes, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=place.start).view(place.box.sizes)

    def seal(self, facts: dict[str, Any], numbers: dict[str, Any]) -> None:
        """The copy is whole: say what it is."""
        table = [[p.name, p.box.offsets, p.box.sizes, p.shape, p.dtype, p.start, p.written] for p in self.places]
        text = json.dumps({"facts": facts, "numbers": numbers, "table": table}).encode()
        self._open(self._end + len(text))[self._end : self._end + len(text)] = text
        self._mark(WHOLE, facts["step"], len(text))

    def void(self) -> None:
        """What is in it is of no use any more."""
        self._laid, self._end = None, ALIGN
        self._mark(EMPTY)

    def size(self) -> int:
        """Bytes that it takes."""
        return os.fstat(self.memory).st_size

    def step(self) -> int | None:
        """Of the whole copy in it, if there is one."""
        size = os.fstat(self.memory).st_size
        if size < HEADER.size:
            return None
        magic, condition, step, _, _ = HEADER.unpack_from(self._open(size), 0)
        return step if magic == MAGIC and condition == WHOLE else None

    def staged(self) -> Staged:
        """The whole copy in it."""
        found = self._open(os.fstat(self.memory).st_size)
        _, _, _, end, length = HEADER.unpack_from(found, 0)
        content = json.loads(found[end : end + length])
        places = [
            StagedEntry(n, Box(tuple(o), tuple(s)), tuple(w), d, a, k) for n, o, s, w, d, a, k in content["table"]
        ]
        return Staged(content["facts"], content["numbers"], [(place, self._tensor(place)) for place in places])

    def summary(self) -> Tensor:
        """Of the whole copy in it: its step, and how long its parts are."""
        _, _, step, end, length = HEADER.unpack_from(self._open(HEADER.size), 0)
        return torch.tensor([step, end, length])

    def content(self) -> Tensor:
        """All bytes of the copy but its condition."""
        _, end, length = self.summary().tolist()
        return torch.frombuffer(self._open(end + length), dtype=torch.uint8, count=end + length - ALIGN, offset=ALIGN)

    def room(self, summary: Tensor) -> Tensor:
        """Room for another slot's `content`. There is nothing in this one until `admit`."""
        _, end, length = summary.tolist()
        self._laid, self._end = None, end
        self._mark(STAGING, length=length)
        return torch.frombuffer(self._open(end + length), dtype=torch.uint8, count=end + length - ALIGN, offset=ALIGN)

    def admit(self, summary: Tensor) -> None:
        """All of it has come."""
        step, _, length = summary.tolist()
        self._mark(WHOLE, step, length)

    def close(self) -> None:
        self.unpin()
        self._map = None  # tensors that still look into it keep it alive
        if self._own:
            os.close(self.memory)
