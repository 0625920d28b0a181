"""A collective or a phase noted in the flight record: what is done at each, and so in few instructions.

This is the plain twin of `c/notes.c`, which writes the same bytes (`compiled_notes`).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType

import torch
from torch import Tensor

from phalanx import flight
from phalanx.flight import (
    DOING,
    DTYPES,
    FLAGS,
    GROUP,
    GROUP_BYTES,
    GROUPS,
    GROUPS_AT,
    KINDS,
    NOW_AT,
    ON_GPU,
    PHASES,
    RECORD,
    RECORDS,
    RECORDS_AT,
    SINCE,
    SITES,
    STEP,
)  # fmt: skip
from phalanx.parallel.communication.places import OTHERS, OURS, ROOT, USERS, Places
from phalanx.parallel.communication.step_sums import StepSums

DEEPEST = 20
"""So many frames of the stack are looked at for a line of the user's."""
TRIES = 16
"""So often in vain; then it is not looked for any more above the same place."""
LARGEST = 0xFFFFFFFF
SIZE, pack = RECORD.size, RECORD.pack_into
RECORDS_IN, WIDTH = RECORDS_AT // 8, RECORD.size // 8
LAST = WIDTH - 1
GROUPS_IN, GROUP_WIDTH = (GROUPS_AT + GROUP.size) // 8 + 1, GROUP_BYTES // 8
"""Places in memory, as numbers of 8 bytes: of a record and of its last number, of how far a group has come."""
ARRIVED, WAITING, LEFT, SEQUENCE = (
    place // 8 for place in (flight.ARRIVED, flight.WAITING, flight.LEFT, flight.SEQUENCE)
)
PHASE_NUMBERS = {name: number for number, name in enumerate(PHASES)}
KIND_NUMBERS = {name: number for number, name in enumerate(KINDS)}
DTYPE_NUMBERS = {getattr(torch, name): number for number, name in enumerate(DTYPES) if hasattr(torch, name)}


class Notes:
    """Of one rank. ``step``: the one that runs."""

    def __init__(
        self, memory: memoryview, places: Places, sums: StepSums, clock: Callable[[], int] | None = None
    ) -> None:
        """``clock``: nanoseconds since 1970; the host's if there is none."""
        self.step = 0
        self._memory, self._numbers = memory, memory.cast("q")
        self._places, self._sums, self._clock = places, sums, clock or time.time_ns
        self._groups = places.groups
        self._count = 0
        self._sites: dict[tuple[int, int], int] = {}
        """By code and place in it. Code is known by its id: to hash it would take as long as all the rest."""
        self._whose: dict[int, int] = {}
        self._further = [0] * SITES
        """By place: how many frames above it a line of the user's was last found; 0: none was."""
        self._in_vain = [0] * SITES
        """How often no line of the user's was found above a place."""
        self._now = NOW_AT // 8
        self._phase, self._since, self._main = 0, self._clock(), threading.get_ident()
        self._covered = [0] * GROUPS
        """By row: until when its time has been counted."""

    def doing(self, phase: str) -> str:
        """This rank begins with something; what it did before."""
        now, numbers, at, sums = self._clock(), self._numbers, self._now, self._sums
        before, self._phase = self._phase, PHASE_NUMBERS[phase]
        sums.spent[before] += now - self._since
        self._since = now
        if sums.step != self.step and self._phase:
            sums.begin(self.step)
        numbers[at + DOING], numbers[at + SINCE], numbers[at + STEP] = self._phase, now, self.step
        self._count = number = self._count + 1
        pack(
            self._memory, RECORDS_AT + number % RECORDS * SIZE, now, 0, 0, 0, 0, self.step, 0, 0, 0, 0, flight.PHASE, 0,
            self._phase, 0, 0, 0, 0, 0, number,
        )  # fmt: skip
        return PHASES[before]

    def launched(self, group: str, axis: str, size: int, kind: str, tensor: Tensor, awaited: bool = False) -> int:
        """A collective is launched; what it is called here. ``awaited``: `arrived` is told when a GPU comes to it."""
        row = self._groups.get(group)
        if row is None:
            row = self._places.new_group(group, axis, size)
        counted = GROUPS_IN + row * GROUP_WIDTH
        numbers = self._numbers
        numbers[counted - 1] = sequence = numbers[counted - 1] + 1
        if not awaited and not tensor.is_cuda:
            numbers[counted] = sequence
        site, user = self._called()
        dims, first = _told(tensor.shape)
        self._count = number = self._count + 1
        now = self._clock()
        pack(
            self._memory, RECORDS_AT + number % RECORDS * SIZE, now, 0 if awaited else now, 0, 0, sequence, self.step,
            row, site, user, 0, KIND_NUMBERS[kind], DTYPE_NUMBERS.get(tensor.dtype, 0), self._phase,
            dims << 1 | ON_GPU if awaited else dims << 1, *first, number,
        )  # fmt: skip
        return number * GROUPS + row

    def arrived(self, record: int) -> None:
        """The GPU has come to a collective."""
        number, row = divmod(record, GROUPS)
        at = RECORDS_IN + number % RECORDS * WIDTH
        if self._numbers[at + LAST] == number:
            self._numbers[at + ARRIVED] = self._clock()
            self._came(row, self._numbers[at + SEQUENCE] & LARGEST)

    def waiting(self, record: int) -> None:
        """From now on a collective is waited for."""
        at = RECORDS_IN + record // GROUPS % RECORDS * WIDTH
        if self._numbers[at + LAST] == record // GROUPS:  # else its place is another's by now
            self._numbers[at + WAITING] = self._clock()

    def left(self, record: int, on_gpu: bool = False) -> None:
        """And now not any more. Where nobody tells when a GPU comes to it, it has by now.

        ``on_gpu``: what was waited is the device's to tell.
        """
        number, row = divmod(record, GROUPS)
        at, numbers = RECORDS_IN + number % RECORDS * WIDTH, self._numbers
        if numbers[at + LAST] != number:
            return
        numbers[at + LEFT] = now = self._clock()
        if self._memory[8 * at + FLAGS] & ON_GPU:
            return
        self._came(row, numbers[at + SEQUENCE] & LARGEST)
        if not on_gpu and threading.get_ident() == self._main:
            sums, waiting = self._sums, numbers[at + WAITING]
            sums.waited[self._phase] += now - waiting
            sums.along[row] += now - waiting
            begun = max(numbers[at], self._covered[row])
            if begun < waiting:
                sums.beside[row] += waiting - begun
            self._covered[row] = now

    def on_device(self, spent: int, waited: int) -> None:
        """Nanoseconds of a step by the clock of this rank's GPU; of these, in collectives."""
        self._sums.on_device(spent, waited)

    def _came(self, row: int, sequence: int) -> None:
        """To this collective of its group, and so to all before it."""
        place = GROUPS_IN + row * GROUP_WIDTH
        if self._numbers[place] < sequence:
            self._numbers[place] = sequence

    def _called(self) -> tuple[int, int]:
        """Where the communicator was called, and the user's line that led there, as numbers of sites."""
        frame: FrameType | None = sys._getframe(2)
        whose, depth = self._whose, 2
        while frame is not None and (whose.get(id(frame.f_code)) or self._owner(frame)) == OURS:
            frame, depth = frame.f_back, depth + 1
        if frame is None:
            return 0, 0
        site = self._sites.get((id(frame.f_code), frame.f_lasti), 0)
        if site and (further := self._further[site]):
            try:
                found = sys._getframe(depth + further)
            except ValueError:  # the stack is not so deep
                return self._searched(frame, depth)
            user = self._sites.get((id(found.f_code), found.f_lasti), 0)
            if user and self._whose[id(found.f_code)] == USERS:
                return site, user
        elif self._in_vain[site] >= TRIES:
            return site, 0
        return self._searched(frame, depth)

    def _searched(self, frame: FrameType | None, depth: int) -> tuple[int, int]:
        """The same, frame by frame."""
        site, begun = 0, depth
        for _ in range(DEEPEST):
            if frame is None:
                break
            owner = self._owner(frame)
            if owner == USERS:
                found = self._site(frame)
                self._further[site] = depth - begun if site else 0
                return site or found, found
            if owner == ROOT:
                break
            if not site and owner == OTHERS:
                site, begun = self._site(frame), depth
            frame, depth = frame.f_back, depth + 1
        self._in_vain[site] += 1
        return site, 0

    def _owner(self, frame: FrameType) -> int:
        code = frame.f_code
        found = self._whose.get(id(code))
        if found is None:
            found = self._whose[id(code)] = self._places.owner(code)
        return found

    def _site(self, frame: FrameType) -> int:
        key = id(frame.f_code), frame.f_lasti
        found = self._sites.get(key, 0)
        if not found and (found := self._places.new_site(frame)):
            self._sites[key] = found
        return found


def _told(shape: torch.Size) -> tuple[int, Sequence[int]]:
    """How many dims are told, and four numbers of them; of more dims the last is of all that follow."""
    dims = len(shape)
    if dims == 1:
        first: Sequence[int] = (shape[0], 0, 0, 0)
    elif dims <= 3:
        first = (*shape, 0, 0, 0, 0)[:4]
    else:
        dims, first = 4, (*shape[:3], shape[3:].numel())
    return dims, first if max(first) <= LARGEST else [min(size, LARGEST) for size in first]
