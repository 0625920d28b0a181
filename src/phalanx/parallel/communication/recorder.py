"""A rank's side of the flight record: each collective and each phase noted, in a few microseconds, in lent memory."""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import Tensor

from phalanx import flight, user_code
from phalanx.flight import (
    DOING,
    DTYPES,
    FIRST,
    FLAGS,
    GROUP,
    GROUP_BYTES,
    GROUPS,
    GROUPS_AT,
    HEADER,
    KINDS,
    MAGIC,
    NOW_AT,
    ON_GPU,
    PHASES,
    RECORD,
    RECORDS,
    RECORDS_AT,
    SINCE,
    SITE_BYTES,
    SITES,
    SITES_AT,
    STEP,
)  # fmt: skip
from phalanx.parallel.communication.step_sums import StepSums

HERE = str(Path(__file__).parent)
DEEPEST = 20
"""So many frames of the stack are looked at for a line of the user's."""
TRIES = 16
"""So often in vain; then it is not looked for any more above the same place."""
LARGEST = 0xFFFFFFFF
OURS, OTHERS, USERS, ROOT = range(4)
"""Whose a frame is: this room's, anybody's, the user's; or the first of a rank."""
SIZE, pack = RECORD.size, RECORD.pack_into
RECORDS_IN, WIDTH = RECORDS_AT // 8, RECORD.size // 8
LAST = WIDTH - 1
GROUPS_IN, GROUP_WIDTH = (GROUPS_AT + GROUP.size) // 8 + 1, GROUP_BYTES // 8
"""Places in memory, as numbers of 8 bytes: of a record and of its last number, of how far a group has come."""
ARRIVED, WAITING, LEFT, SEQUENCE = (
    place // 8 for place in (flight.ARRIVED, flight.WAITING, flight.LEFT, flight.SEQUENCE)
)
_phases = {name: number for number, name in enumerate(PHASES)}
_kinds = {name: number for number, name in enumerate(KINDS)}
_dtypes = {getattr(torch, name): number for number, name in enumerate(DTYPES) if hasattr(torch, name)}


class FlightRecorder:
    """Writes this rank's flight record into memory that its supervisor lends."""

    def __init__(self, memory: memoryview, rank: int, world: int, generation: int) -> None:
        self.memory = memory
        self._numbers = memory.cast("q")
        self._count = itertools.count(1)
        self._groups: dict[str, int] = {}
        self._sites: dict[tuple[int, int], int] = {}
        """By code and place in it. Code is known by its id: to hash it would take as long as all the rest."""
        self._whose: dict[int, tuple[int, CodeType]] = {}
        self._ours: set[int] = set()
        self._further = [0] * SITES
        """By place: how many frames above it a line of the user's was last found; 0: none was."""
        self._in_vain = [0] * SITES
        """How often no line of the user's was found above a place."""
        self._now = NOW_AT // 8
        self.step = 0
        self._phase, self._since, self._main = 0, time.time_ns(), threading.get_ident()
        self._sums = StepSums(self._numbers)
        self.axes: list[str] = []
        """By row of a group."""
        self._covered = [0] * GROUPS
        """By row: until when its time has been counted."""
        HEADER.pack_into(
            self.memory, 0, MAGIC, rank, world, generation, os.getpid(), os.getppid(),
            socket.gethostname().encode()[:64], threading.main_thread().ident or 0,
        )  # fmt: skip
        self.doing("start-up")

    def doing(self, phase: str) -> str:
        """This rank begins with something; what it did before."""
        now, numbers, at, sums = time.time_ns(), self._numbers, self._now, self._sums
        before, self._phase = self._phase, _phases[phase]
        sums.spent[before] += now - self._since
        self._since = now
        if sums.step != self.step and self._phase:
            if sums.step is None:
                numbers[at + FIRST] = self.step
            sums.begin(self.step)
        numbers[at + DOING], numbers[at + SINCE], numbers[at + STEP] = self._phase, now, self.step
        number = next(self._count)
        pack(
            self.memory, RECORDS_AT + number % RECORDS * SIZE, now, 0, 0, 0, 0, self.step, 0, 0, 0, 0, flight.PHASE, 0,
            self._phase, 0, 0, 0, 0, 0, number,
        )  # fmt: skip
        return PHASES[before]

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before = self.doing(phase)
        try:
            yield
        finally:
            self.doing(before)

    def launched(self, group: str, axis: str, size: int, kind: str, tensor: Tensor, awaited: bool = False) -> int:
        """A collective is launched; what it is called here. ``awaited``: `arrived` is told when a GPU comes to it."""
        row = self._groups.get(group)
        if row is None:
            row = self._new_group(group, axis, size)
        counted = GROUPS_IN + row * GROUP_WIDTH
        numbers = self._numbers
        numbers[counted - 1] = sequence = numbers[counted - 1] + 1
        if not awaited and not tensor.is_cuda:
            numbers[counted] = sequence
        site, user = self._called()
        dims, first = _told(tensor.shape)
        now, number = time.time_ns(), next(self._count)
        pack(
            self.memory, RECORDS_AT + number % RECORDS * SIZE, now, 0 if awaited else now, 0, 0, sequence, self.step,
            row, site, user, 0, _kinds[kind], _dtypes.get(tensor.dtype, 0), self._phase,
            dims << 1 | ON_GPU if awaited else dims << 1, *first, number,
        )  # fmt: skip
        return number * GROUPS + row

    def arrived(self, record: int) -> None:
        """The GPU has come to a collective."""
        number, row = divmod(record, GROUPS)
        at = RECORDS_IN + number % RECORDS * WIDTH
        if self._numbers[at + LAST] == number:
            self._numbers[at + ARRIVED] = time.time_ns()
            self._came(row, self._numbers[at + SEQUENCE] & LARGEST)

    def waiting(self, record: int) -> None:
        """From now on a collective is waited for."""
        at = RECORDS_IN + record // GROUPS % RECORDS * WIDTH
        if self._numbers[at + LAST] == record // GROUPS:  # else its place is another's by now
            self._numbers[at + WAITING] = time.time_ns()

    def left(self, record: int, on_gpu: bool = False) -> None:
        """And now not any more. Where nobody tells when a GPU comes to it, it has by now.

        ``on_gpu``: what was waited is the device's to tell.
        """
        number, row = divmod(record, GROUPS)
        at, numbers = RECORDS_IN + number % RECORDS * WIDTH, self._numbers
        if numbers[at + LAST] != number:
            return
        numbers[at + LEFT] = now = time.time_ns()
        if self.memory[8 * at + FLAGS] & ON_GPU:
            return
        if numbers[GROUPS_IN + row * GROUP_WIDTH] < (sequence := numbers[at + SEQUENCE] & LARGEST):
            self._came(row, sequence)
        if not on_gpu and threading.get_ident() == self._main:
            sums, waiting = self._sums, numbers[at + WAITING]
            sums.waited[self._phase] += now - waiting
            sums.along[row] += now - waiting
            begun = max(numbers[at], self._covered[row])
            if begun < waiting:
                sums.beside[row] += waiting - begun
            self._covered[row] = now

    def along(self) -> list[tuple[int, int]]:
        """By row of a group, since ever: nanoseconds waited, and those from launches until then."""
        rows = len(self.axes)
        return list(zip(self._sums.along[:rows], self._sums.beside[:rows], strict=True))

    def on_device(self, spent: float, waited: float) -> None:
        """Seconds of a step by the clock of this rank's GPU; of these, in collectives."""
        self._sums.on_device(round(1e9 * spent), round(1e9 * waited))

    def _came(self, row: int, sequence: int) -> None:
        """To this collective of its group, and so to all before it."""
        place = GROUPS_IN + row * GROUP_WIDTH
        if self._numbers[place] < sequence:
            self._numbers[place] = sequence

    def _new_group(self, group: str, axis: str, size: int) -> int:
        """Those for which there is no row share the last."""
        row = self._groups[group] = min(len(self._groups), GROUPS - 1)
        if row == len(self.axes):
            self.axes.append(axis)
        axis = "world" if axis == "default_pg" else axis
        GROUP.pack_into(self.memory, GROUPS_AT + row * GROUP_BYTES, group.encode()[:72], axis.encode()[:24], size, 0)
        return row

    def _called(self) -> tuple[int, int]:
        """Where the communicator was called, and the user's line that led there, as numbers of sites."""
        frame: FrameType | None = sys._getframe(4)
        ours, depth = self._ours, 4
        while frame is not None and id(frame.f_code) in ours:
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
            if user and self._whose[id(found.f_code)][0] == USERS:
                return site, user
        elif self._in_vain[site] >= TRIES:
            return site, 0
        return self._searched(frame, depth)

    def _searched(self, frame: FrameType | None, depth: int) -> tuple[int, int]:
        """The same, frame by frame."""
        site, whose, begun = 0, self._whose, depth
        for _ in range(DEEPEST):
            if frame is None:
                break
            code = frame.f_code
            known = whose.get(id(code))
            owner = known[0] if known is not None else self._new_owner(code)
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

    def _new_owner(self, code: CodeType) -> int:
        owner, _ = self._whose[id(code)] = _whose(code), code
        if owner == OURS:
            self._ours.add(id(code))
        return owner

    def _site(self, frame: FrameType) -> int:
        found = self._sites.get((id(frame.f_code), frame.f_lasti))
        return self._new_site(frame) if found is None else found

    def _new_site(self, frame: FrameType) -> int:
        """The first stands for all that there is no room for."""
        number = len(self._sites) + 1
        if number >= SITES:
            return 0
        self._sites[id(frame.f_code), frame.f_lasti] = number
        file = frame.f_code.co_filename
        own = Path(file).is_relative_to(user_code.OWN)
        name = user_code.place(file, frame.f_lineno)
        name = f"{Path(file).relative_to(user_code.OWN.parent)}:{frame.f_lineno}" if own else name
        self._text(SITES_AT + number * SITE_BYTES, name[-(SITE_BYTES - 1) :], SITE_BYTES)
        return number

    def _text(self, at: int, text: str, size: int) -> None:
        self.memory[at : at + size] = text.encode(errors="replace")[:size].ljust(size, b"\0")


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


def _whose(code: CodeType) -> int:
    if code.co_filename.startswith(HERE):
        return OURS
    if user_code.is_root(code.co_filename, code.co_name):
        return ROOT
    return USERS if user_code.is_users_line(code.co_filename) else OTHERS
