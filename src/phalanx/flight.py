"""The flight record: the last collectives and phases of each rank, in memory of a fixed size that outlives it.

A rank writes into memory that its supervisor lends (`parallel.communication.recorder`); the supervisor puts it into the
run's folder now and then, and when something goes wrong (`launch.black_box`). It is no file of the rank's own: to write
to a mapped file ends a process where the disk is full (SIGBUS), and stops it where a shared folder does not answer.

runs/<name>/flight/generation-00001/rank-00000    a header, a row a group, places in the code, a ring of records, one of
                                                  steps; packed
"""

from __future__ import annotations

import re
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.folder_files import (
    BadFile,
    appending,
    left_out,
    make_folder,
    names,
    note,
    overwriting,
    read_bytes,
)
from phalanx.redact import redact_bytes
from phalanx.run import MOST_GENERATIONS, Run
from phalanx.words import in_bytes

MAGIC = b"PHLXFLT3"
GROUPS, SITES, RECORDS = 48, 256, 4096
"""How many groups, places in the code and records are kept."""
HEADER = struct.Struct("<8s5I64sQ")
"""What it is, rank, world, generation, process, supervisor; host; its main thread's number in stacks."""
NOW_AT = 104
"""Then, as whole numbers: what the rank does, since when, in which step, when this was saved, its first step."""
DOING, SINCE, STEP, SAVED, FIRST = range(5)
GROUP = struct.Struct("<72s24sII")
"""A group's own name, its axis, how many ranks it has. Then: collectives launched there, and come to."""
GROUP_BYTES, SITE_BYTES = 120, 128
GROUPS_AT = 256
SITES_AT = GROUPS_AT + GROUPS * GROUP_BYTES
RECORDS_AT = SITES_AT + SITES * SITE_BYTES
RECORD = struct.Struct("<4q2I4H4B4I4xq")
"""Launched, come to, waited for since, left (nanoseconds of the clock, 0: not yet); number in its group, step; group,
place, place in the user's code, nothing; kind, dtype, phase, flags; shape; its number, which is written last."""
STEPS_AT = RECORDS_AT + RECORDS * RECORD.size
STEPS, MOST_PHASES = 64, 16
"""So many steps are kept as sums, however many records one has."""
HAD, QUEUED, COMPILED, COMPILING, ON_DEVICE, DEVICE_WAITED, SPENT = range(1, 8)
WAITED = SPENT + MOST_PHASES
WAITED_ALONG = WAITED + MOST_PHASES
NUMBERS_A_STEP = WAITED_ALONG + GROUPS
"""Of a step: its number and one more; what its main thread had of a processor, and how long it waited for one; how many
functions were compiled, and how long that took; by the clock of its GPU, how long the step took, and how much of it was
spent waiting in collectives; then by phase, of these in collectives, and the same by group. All but the counts are
nanoseconds."""
BYTES = STEPS_AT + STEPS * NUMBERS_A_STEP * 8
LAUNCHED, ARRIVED, WAITING, LEFT = (8 * column for column in range(4))
ON_GPU = 1
"""Among its flags; the others are how many dims its shape has, times two."""

PHASE = 0
MOST_PACKED = 1 << 20
"""Bytes of a record in the run's folder."""
MOST_RANKS = 1 << 17
MOST_KEPT, KEPT_OF_PACKED, EACH = 1 << 28, 64, 1 << 16
"""Bytes that a generation's records may take, and so many times more than their files; what each takes at least."""
KINDS = (
    "phase", "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send", "receive", "words",
    "barrier", "reduce", "gather", "scatter",
)  # fmt: skip
"""Of records: a phase that begins, or a collective."""
UNEVEN = ("all-to-all", "words")
"""Collectives to which ranks may bring different amounts."""
PHASES = (
    "start-up", "data", "forward", "backward", "reduce", "update", "wait", "checkpoint", "evaluation", "callbacks",
    "comparing replicas", "ending", "outer step",
)  # fmt: skip
"""What a rank may be doing."""
DTYPES = (
    "another dtype", "float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool",
    "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip

COLUMNS = np.dtype(
    [
        ("launched", "<i8"), ("arrived", "<i8"), ("waiting", "<i8"), ("left", "<i8"), ("sequence", "<u4"),
        ("step", "<u4"), ("group", "<u2"), ("site", "<u2"), ("user", "<u2"), ("", "<u2"), ("kind", "u1"),
        ("dtype", "u1"), ("phase", "u1"), ("flags", "u1"), ("shape", "<u4", (4,)), ("_", "V4"), ("number", "<i8"),
    ]
)  # fmt: skip
SEQUENCE, FLAGS = (COLUMNS.fields[name][1] for name in ("sequence", "flags"))  # type: ignore[index]
"""Where in a record these are."""
OUTSIDE = "torch.distributed"
"""The axis of collectives that user code calls through torch itself, and how the names of their groups begin."""
OVERWRITTEN = 8
"""So many of the oldest records may be overwritten while memory is copied, and are left out."""


@dataclass(frozen=True)
class Launch:
    """A collective on one rank."""

    rank: int
    host: str
    axis: str
    group: str
    sequence: int
    kind: str
    dtype: str
    shape: tuple[int, ...]
    step: int
    phase: str
    site: str
    """Where it was called, below the communicator."""
    user: str
    """The user's line that led there, if one did."""
    entered: int
    """When; 0: a GPU has yet to come to it."""
    waiting: int
    left: int

    @property
    def place(self) -> str:
        """File and line, the user's if there is one."""
        return self.user or self.site

    @property
    def name(self) -> str:
        return f"{self.kind} {self.sequence} on {self.axis}"

    @property
    def content(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class GroupRow:
    """What a rank has done along one group."""

    name: str
    axis: str
    size: int
    launched: int
    arrived: int
    """Collectives come to: those launched, or those that its GPU has reached."""


@dataclass
class Flight:
    """One rank's record, read back."""

    rank: int
    world: int
    generation: int
    pid: int
    supervisor: int
    host: str
    thread: int
    phase: str
    since: int
    """When the phase began."""
    step: int
    saved: int
    """When the memory was copied."""
    first: int
    """The first step of this process."""
    groups: dict[str, GroupRow]
    records: np.ndarray
    """All in order, with the columns of `COLUMNS`; phases among them."""
    steps: np.ndarray
    """The last steps in order, a row each, of `NUMBERS_A_STEP`; the newest may go on."""
    _rows: list[GroupRow] = field(default_factory=list)
    _sites: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, memory: bytes) -> Flight:
        """Of memory as a rank has written it; ValueError where it is something else."""
        if len(memory) != BYTES or not memory.startswith(MAGIC):
            raise ValueError("this is no flight record")
        _, rank, world, generation, pid, supervisor, host, thread = HEADER.unpack_from(memory)
        now = struct.unpack_from("<5q", memory, NOW_AT)
        if not (min(now) >= 0 and now[DOING] < len(PHASES) and max(now[STEP], now[FIRST]) < 1 << 53):
            raise ValueError("this is no flight record")
        rows = list(_groups(memory))
        sites = [_text(memory[at : at + SITE_BYTES]) for at in range(SITES_AT, RECORDS_AT, SITE_BYTES)]
        records = np.frombuffer(memory, COLUMNS, RECORDS, RECORDS_AT)
        newest = int(records["number"].max())
        records = records[records["number"] > max(0, newest - RECORDS + OVERWRITTEN)]
        records = records[np.argsort(records["number"])]
        records = records[_fit(records, rows)]
        steps = np.frombuffer(memory, "<i8", STEPS * NUMBERS_A_STEP, STEPS_AT).reshape(STEPS, NUMBERS_A_STEP)
        steps = steps[steps[:, 0] > 0]
        return cls(
            rank, world, generation, pid, supervisor, _text(host), thread, PHASES[now[DOING]], now[SINCE], now[STEP],
            now[SAVED], now[FIRST], {row.name: row for row in rows if row.name}, records,
            steps[np.argsort(steps[:, 0])], rows, sites,
        )  # fmt: skip

    def waited(self, group: str) -> np.ndarray:
        """Seconds in collectives of a group, by step of ``steps``."""
        return self.steps[:, WAITED_ALONG + self._rows.index(self.groups[group])] / 1e9

    def launch(self, record: Any) -> Launch:
        """One of its records in words."""
        row = self._rows[record["group"]]
        gpu, dims = record["flags"] & ON_GPU, record["flags"] >> 1
        return Launch(
            self.rank, self.host, row.axis, row.name, int(record["sequence"]), KINDS[record["kind"]],
            DTYPES[record["dtype"]], tuple(map(int, record["shape"][:dims])), int(record["step"]),
            PHASES[record["phase"]], self._sites[record["site"]], self._sites[record["user"]],
            int(record["arrived"] if gpu else record["launched"]), int(record["waiting"]), int(record["left"]),
        )  # fmt: skip

    def along(self, group: str) -> np.ndarray:
        """Its records of one group."""
        if group not in self.groups:
            return self.records[:0]
        return self.collectives[self.collectives["group"] == self._rows.index(self.groups[group])]

    @property
    def collectives(self) -> np.ndarray:
        return self.records[self.records["kind"] != PHASE]

    def inside(self) -> Launch | None:
        """The collective that this rank waits in, if any; of a GPU the last that it has come to, which may be over."""
        found = self.collectives
        on_gpu = (found["flags"] & ON_GPU).astype(bool)
        waits = found[~on_gpu & (found["waiting"] > found["left"])]
        if len(waits):
            return self.launch(waits[-1])
        come_to = found[on_gpu & (found["arrived"] > 0)]
        return self.launch(come_to[-1]) if len(come_to) else None


def _fit(records: np.ndarray, rows: Sequence[GroupRow]) -> np.ndarray:
    """Which records name a kind, a phase, a group and places that there are."""
    named = np.array([bool(row.name) for row in rows])
    found = (records["kind"] < len(KINDS)) & (records["dtype"] < len(DTYPES)) & (records["phase"] < len(PHASES))
    found &= (records["site"] < SITES) & (records["user"] < SITES) & (records["flags"] >> 1 <= 4)
    known = named[np.minimum(records["group"], GROUPS - 1)] & (records["group"] < GROUPS)
    return np.asarray(found & (known | (records["kind"] == PHASE)))


def _groups(memory: bytes) -> Iterator[GroupRow]:
    for at in range(GROUPS_AT, SITES_AT, GROUP_BYTES):
        name, axis, size, _ = GROUP.unpack_from(memory, at)
        launched, arrived = struct.unpack_from("<2q", memory, at + GROUP.size)
        yield GroupRow(_text(name), _text(axis), max(1, size), launched, arrived)


def _text(letters: bytes) -> str:
    return letters.partition(b"\0")[0].decode(errors="replace")


def folder(run: Run, generation: int, what: str = "flight") -> Path:
    """Where the records of a generation lie, or its ``stacks``."""
    return run.path / what / f"generation-{generation:05d}"


def save(run: Run, generation: int, rank: int, memory: bytes | bytearray) -> None:
    """Put a rank's memory, as it is now, into the run's folder."""
    content = bytearray(memory)
    struct.pack_into("<q", content, NOW_AT + 8 * SAVED, time.time_ns())
    redact_bytes(content, GROUPS_AT, RECORDS_AT)
    path = folder(run, generation) / f"rank-{rank:05d}"
    make_folder(run.path, path.parent)
    unfinished = path.with_suffix(".unfinished")  # not on disk before it has its name: it is written again and again
    with overwriting(run.path, unfinished) as file:
        file.write(zlib.compress(content, 1))
    unfinished.replace(path)


def read(run: Run, generation: int) -> dict[int, Flight]:
    """By rank, what the folder has of a generation; what cannot be read is left out."""
    found: dict[int, Flight] = {}
    packed = kept = 0
    for rank, path in paths(run, generation).items():
        with left_out():
            content = read_bytes(run.path, path, MOST_PACKED)
            flight = _unpacked(content, path)
            if flight.rank != rank:
                raise BadFile(path, f"is a record of rank {flight.rank}")
            packed, kept = packed + len(content), kept + EACH + flight.records.nbytes + flight.steps.nbytes
            if kept > MOST_KEPT + KEPT_OF_PACKED * packed:
                size = in_bytes(kept)
                note(f"{path.parent} has records that unpack to {size}: those from rank {rank} on are left out")
                break
            found[rank] = flight
    return found


def paths(run: Run, generation: int) -> dict[int, Path]:
    """By rank, the files that may be records of a generation."""
    at = folder(run, generation)
    every = [name for name in names(run.path, at) if re.fullmatch(r"rank-\d{5,6}", name)]
    return {rank: at / name for name in every if (rank := int(name[5:])) < MOST_RANKS}


def _unpacked(content: bytes, path: Path) -> Flight:
    try:
        return Flight.of(zlib.decompressobj().decompress(content, BYTES + 1))
    except (ValueError, zlib.error, struct.error) as error:
        raise BadFile(path, f"is no flight record ({error})") from None


def note_stop(run: Run, generation: int) -> None:
    """Somebody asked it to end: also where ranks had no time left to say so."""
    with suppress(OSError, BadFile):  # a full disk: the screen has said it
        make_folder(run.path, folder(run, generation))
        with appending(run.path, folder(run, generation) / "stopped"):
            pass


def was_stopped(run: Run, generation: int) -> bool:
    return (folder(run, generation) / "stopped").exists()


def generations(run: Run) -> Sequence[int]:
    """Those of which there is a record, the newest last."""
    every = names(run.path, run.path / "flight")
    found = [int(name.rpartition("-")[2]) for name in every if re.fullmatch(r"generation-\d{5,10}", name)]
    return sorted(generation for generation in found if generation < MOST_GENERATIONS)
