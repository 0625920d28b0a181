"""A rank's events: one JSON object a line, in the run's folder."""

from __future__ import annotations

import json
import math
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from phalanx import streams
from phalanx.event_ring import IS_SHARED, PAUSE, RING_BYTES, EventRing
from phalanx.files import no_room
from phalanx.folder_files import make_folder, open_file
from phalanx.redact import redact
from phalanx.run import Run
from phalanx.step_lines import StepLines
from phalanx.words import printable

BACKLOG_BYTES = 64 << 20
"""Events that wait in memory for a disk to take them; more than that are lost, and counted."""
SETTLE_SECONDS = 60.0
LARGEST_EVENT = RING_BYTES // 2
KEPT_LETTERS, KEPT_ITEMS = 1000, 60
"""Of texts and lists of one that is larger."""
StepFields = tuple[Mapping[str, Any], Mapping[str, float], Mapping[str, int], bool]
"""What `StepLines.of` takes."""

SHARED = frozenset(
    {
        "evaluation", "left out", "rollback", "bad", "replay", "corrupted", "damaged", "stopped", "end", "pause",
        "dead gradients", "comm",
    }
)  # fmt: skip
"""Kinds of events that all ranks note alike."""
SHARED_OF_A_STEP = frozenset(
    {
        "loss", "losses", "logged", "grad_norm", "clip_factor", "lr", "count", "slots", "samples", "skipped", "bad",
        "signals", "turn",
    }
)  # fmt: skip
"""What of a step is the same on all ranks; the rest each has for itself."""


def writers(hosts: Sequence[int]) -> list[int]:
    """The ranks that write what all share: the first of each host, given by rank. One host's may be lost."""
    first: dict[int, int] = {}
    for rank, host in enumerate(hosts):
        first.setdefault(host, rank)
    return list(first.values())


def pause_of(rank: int, hosts: Sequence[int]) -> float:
    """For how many seconds a rank's steps may wait in its memory before they are written.

    The first rank's events are what recovery and certificate are made from, and the last writer's, on another host if
    there are several, stand in for them: they are written at once. Ten thousand ranks would be too many writes a step
    for a folder that all hosts share: at most about a hundred ranks write in a second.
    """
    return 0.0 if rank in (0, hosts.index(hosts[-1])) else max(1.0, len(hosts) / 100)


def say(line: str, file: IO[str] | None = None) -> None:
    """One line for people. What it tells of goes on, also where nobody can be told."""
    with suppress(OSError):
        print(printable(redact(line)), file=file or streams.stdout(), flush=True)


class EventAppender:
    """Where a rank's events are written: each at once, and what the disk does not take waits in memory.

    Steps may wait for a ``pause`` between two writes. Not ``shared``: another rank writes what all of them share.
    """

    def __init__(self, run: Run, rank: int, pause: float = 0.0, *, shared: bool = True) -> None:
        self._pause, self._written, self._shared = pause, time.monotonic(), shared
        self._folder, self._path = run.path, run.events_path(rank)
        self._steps = StepLines(shared)
        self._file: int | None = None
        self._waiting = bytearray()
        self._lost = 0
        self._refused = False
        self._lock = threading.Lock()  # checkpoints are noted behind the steps
        try:
            self._open()
        except OSError as error:
            if not no_room(error):
                raise

    def take(self, kind: str, when: float, fields: dict[str, Any] | StepFields) -> None:
        """A line, in one piece; with a checkpoint, all before it is on disk too."""
        found = self._steps.of(when, *fields) if isinstance(fields, tuple) else fields
        if not self._shared and kind in SHARED:
            return
        if not self._shared and kind == "step":
            found = {name: value for name, value in found.items() if name not in SHARED_OF_A_STEP}
        line = json.dumps({"kind": kind, "time": when, **plain(found)}).encode() + b"\n"
        with self._lock:
            if len(self._waiting) + len(line) <= BACKLOG_BYTES:
                self._waiting += line
            else:
                self._lost += 1
            if kind != "step" or time.monotonic() >= self._written + self._pause:
                self._flush(sync=kind == "checkpoint")

    def _open(self) -> int:
        if self._file is None:
            make_folder(self._folder, self._path.parent)
            _drop_cut_line(self._folder, self._path)
            self._file = open_file(self._folder, self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        return self._file

    def _flush(self, sync: bool) -> None:
        """Write what waits; where that fails, the run goes on."""
        self._written = time.monotonic()
        try:
            file = self._open()
            while self._waiting:
                del self._waiting[: os.write(file, self._waiting)]
            if sync:
                os.fsync(file)
        except OSError as error:
            if not self._refused:
                self._say(f"cannot be written: {error.strerror}; going on, events wait in memory")
            self._refused = True
            return
        if self._refused:
            self._say("can be written again" + (f"; {self._lost} events were too many to keep" if self._lost else ""))
        self._refused = False

    def _say(self, words: str) -> None:
        say(f"   note  {self._path} {words}", file=streams.stderr())

    def close(self) -> None:
        """What the disk takes at last is written; what it does not is lost, and said to be."""
        with self._lock:
            self._flush(sync=False)
            if self._waiting:
                self._say(f"lacks {self._waiting.count(10)} events, for which there was no room to the end")
            if self._file is not None:
                os.close(self._file)
                self._file = None


class EventLog:
    """A rank's events: written by itself, or by its supervisor, which takes them from a ``ring``."""

    def __init__(
        self, run: Run, rank: int, pause: float = 0.0, *, shared: bool = True, ring: EventRing | None = None
    ) -> None:
        """``pause`` and ``shared``: as `EventAppender` has them."""
        self._ring, self._file = ring, None if ring else EventAppender(run, rank, pause, shared=shared)
        self._unsent: deque[bytes] = deque()
        self._bytes = self._lost = 0
        self._lock = threading.Lock()
        if ring is not None:
            ring.header[PAUSE], ring.header[IS_SHARED] = round(1000 * pause), shared

    def write(self, kind: str, **fields: Any) -> None:
        """An event; of a checkpoint, once it is on disk with all before it."""
        self._give(kind, plain(fields))
        if kind == "checkpoint":
            self.settle()

    def step(
        self, facts: Mapping[str, Any], numbers: Mapping[str, float], held: Mapping[str, int], last: bool = False
    ) -> None:
        """A step, as `StepLines` takes it."""
        self._give("step", (facts, numbers, held, last))

    def _give(self, kind: str, fields: dict[str, Any] | StepFields) -> None:
        if self._file is not None:
            self._file.take(kind, time.time(), fields)
            return
        assert self._ring is not None
        piece = pickle.dumps((kind, time.time(), fields), pickle.HIGHEST_PROTOCOL)
        if len(piece) > LARGEST_EVENT:
            piece = pickle.dumps((kind, time.time(), _shortened(fields)), pickle.HIGHEST_PROTOCOL)
        with self._lock:
            if len(piece) > LARGEST_EVENT or self._bytes + len(piece) > BACKLOG_BYTES:
                self._lost += 1
            elif self._unsent or not self._ring.put(piece):
                self._unsent.append(piece)
                self._bytes += len(piece)
            if self._unsent:
                self._send()

    def _send(self) -> None:
        """What there is room for."""
        assert self._ring is not None
        while self._unsent and self._ring.put(self._unsent[0]):
            self._bytes -= len(self._unsent.popleft())

    def settle(self, seconds: float = SETTLE_SECONDS) -> bool:
        """Wait until all events so far are in their file, and not for ever: whether they are."""
        deadline = time.monotonic() + seconds
        while self._ring is not None:
            with self._lock:
                self._send()
                if not self._unsent and self._ring.empty:
                    break
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    def close(self) -> None:
        """What could not be handed over is said to be lost."""
        settled = self.settle()
        if not settled or self._lost:
            say(f"   note  {self._lost + len(self._unsent)} events of this rank were lost", file=streams.stderr())
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.write("failure", reason=f"{type(error).__name__}: {error}")
        self.close()


def _shortened(value: Any) -> Any:
    """Long texts and lists cut off, and marked so: one event may not take all the room there is."""
    if isinstance(value, dict):
        return {name: _shortened(item) for name, item in list(value.items())[:KEPT_ITEMS]}
    if isinstance(value, (list, tuple)):
        kept = [_shortened(item) for item in value[:KEPT_ITEMS]]
        return type(value)(kept if len(value) <= KEPT_ITEMS else [*kept, f"and {len(value) - KEPT_ITEMS} more"])
    long = isinstance(value, str) and len(value) > KEPT_LETTERS
    return f"{value[:KEPT_LETTERS]} ... (cut off: {len(value)} letters)" if long else value


def _drop_cut_line(folder: Path, path: Path) -> None:
    """What a killed rank had half written is no event."""
    if not path.exists() or not path.stat().st_size:
        return
    with os.fdopen(open_file(folder, path, os.O_RDWR), "rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 4096)
            file.seek(start)
            cut = file.read(end - start).rfind(b"\n")
            if cut >= 0:
                file.truncate(start + cut + 1)
                return
            end = start
        file.truncate(0)


def plain(value: Any) -> Any:
    """What JSON has no word for, nan and inf and paths among it, as text; no text with a secret."""
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, str) and not value):
        return value
    return redact(str(value))
