"""The Run: one run on disk. Every tool reads and writes this folder and nothing else.

runs/<name>/run.toml                   settings as resolved; ``phalanx train --config run.toml`` repeats the run
runs/<name>/events/rank-00000.jsonl    one JSON object a line: start, step, evaluation, checkpoint, failure, end
runs/<name>/checkpoints/step-00000100/ committed or absent
runs/<name>/final/model.safetensors    full weights under the model's own names
runs/<name>/final/certificate.json     that every planned step was done, once, and what came of it
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import math
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from phalanx.errors import WrongUse
from phalanx.redact import redact
from phalanx.toml import from_toml, to_toml

Settings = Mapping[str, Any]
BACKLOG_BYTES = 64 << 20
"""Events that wait in memory for a disk to take them; more than that are lost, and counted."""
LONGEST_PAUSE = 30.0
"""Seconds between two looks whether there is room on a disk that was full."""


class Run:
    """A run's folder. `create` makes a new one; ``Run(path)`` opens one that is there."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    def create(cls, path: str | Path | None, name: str) -> Run:
        """A new folder: the one asked for, which must not hold a run, or the next free ``runs/<name>-<number>``."""
        if path is not None:
            cls(path).check_free()
        return cls.folder(path, name)

    @classmethod
    def folder(cls, path: str | Path | None, name: str) -> Run:
        """The folder asked for, made if it is not there, or the next free ``runs/<name>-<number>``."""
        if path is not None:
            _make(Path(path), exist_ok=True)
            return cls(path)
        _make(Path("runs"), exist_ok=True)
        number = 1
        while True:
            try:
                candidate = Path("runs") / f"{name}-{number:03d}"
                _make(candidate)
                return cls(candidate)
            except FileExistsError:  # taken, perhaps by another run that starts at this moment
                number += 1

    def check_free(self) -> None:
        """Refuse a folder that holds a run."""
        if exists(self.settings_path):
            raise WrongUse(f"{self.path} holds a run already. Give another --run, or remove that folder.")

    @property
    def settings_path(self) -> Path:
        return self.path / "run.toml"

    @property
    def weights_path(self) -> Path:
        return self.path / "final" / "model.safetensors"

    @property
    def checkpoints_path(self) -> Path:
        return self.path / "checkpoints"

    @property
    def certificate_path(self) -> Path:
        return self.path / "final" / "certificate.json"

    def certified_steps(self) -> int | None:
        """How long the run is if it is finished; None if it is not."""
        try:
            return int(json.loads(self.certificate_path.read_text())["steps"])
        except (OSError, ValueError, KeyError):
            return None

    def held(self, patience: float = 0.0, what: str = "") -> AbstractContextManager[None]:
        """While this process runs the run: nobody else may."""
        return held(self.path, patience, what)

    def generation(self) -> int:
        """The number of the last set of ranks of this run: each start of them is a generation."""
        path = self.path / "generation"
        try:
            return int(path.read_text())
        except (FileNotFoundError, ValueError) as error:
            noted = max((int(event.get("generation", 0)) for event in self.events(0, "start")), default=0)
            if isinstance(error, ValueError):
                print(f"   note  {path} is damaged; the run's events know of generation {noted}", file=sys.stderr)
            return noted

    def next_generation(self, at_least: int = 0) -> int:
        """A number that no generation has had."""
        path = self.path / "generation"
        number = max(self.generation() + 1, at_least)
        when_there_is_room(path, lambda: write_whole(path, f"{number}\n"))
        return number

    def last_committed(self) -> int | None:
        """The step of the newest checkpoint that the run's events say was committed."""
        saved = (event["step"] for event in self.events(0, "checkpoint") if "failed" not in event)
        return max(saved, default=None)

    def ledger(self, rank: int = 0) -> dict[int, dict[str, Any]]:
        """The steps that led to where the run stands; one that was done again counts as it was last done."""
        done: dict[int, dict[str, Any]] = {}
        for event in self.events(rank):
            if event["kind"] in ("start", "rollback"):
                done = {step: known for step, known in done.items() if step < event.get("step", 0)}
            elif event["kind"] in ("step", "left out"):
                done[event["step"]] = event
        return done

    def events_path(self, rank: int) -> Path:
        return self.path / "events" / f"rank-{rank:05d}.jsonl"

    def write_settings(self, settings: Mapping[str, Settings]) -> None:
        """Write ``run.toml``, a table a section, for the user and their group. Values that are None are left out."""
        write_whole(self.settings_path, to_toml(settings), 0o640)

    def settings(self) -> dict[str, dict[str, Any]]:
        return read_settings(self.settings_path)

    def task(self) -> str:
        """What it trains, by its own word."""
        task = self.settings().get("run", {}).get("task")
        if not isinstance(task, str):
            raise WrongUse(
                f"{self.settings_path} does not say what was trained: it was cut short, perhaps. Restore it, or begin "
                "a run in another folder."
            )
        return task

    def events(self, rank: int, *kinds: str) -> Iterator[dict[str, Any]]:
        """What a rank wrote, in order, if anything; of these kinds, or all. What was cut short is no event."""
        if not self.events_path(rank).exists():
            return
        begins = tuple(f'{{"kind": "{kind}"' for kind in kinds) or ("{",)  # a long run's log is not parsed for a few
        with self.events_path(rank).open() as lines:
            for line in lines:
                if line.startswith(begins) and line.endswith("\n"):
                    with suppress(ValueError):  # cut by a full disk
                        yield json.loads(line)


def exists(path: Path) -> bool:
    """Whether it is there; what cannot even be asked for, its name being too long perhaps, is not."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def write_whole(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Write a small file so that whoever reads it, after a power cut too, finds the old content or the new."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.unlink(missing_ok=True)  # with whatever mode it had
    with open(unfinished, "wb", opener=partial(os.open, mode=mode)) as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """What a folder lists, on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def no_room(error: BaseException | None) -> bool:
    """Whether a disk is full, or a quota."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def pauses() -> Iterator[float]:
    """Seconds to wait before each next look whether there is room."""
    return (min(LONGEST_PAUSE, 0.25 * 2**attempt) for attempt in itertools.count())


def when_there_is_room(path: Path, write: Callable[[], None]) -> None:
    """Write what the run cannot go on without, as soon as the disk takes it."""
    for attempt, pause in enumerate(pauses()):
        try:
            write()
        except OSError as error:
            if not no_room(error):
                raise
            if not attempt:
                print(f"   note  {path} cannot be written: {error.strerror}; waiting for room", file=sys.stderr)
            time.sleep(pause)
            continue
        if attempt:
            print(f"   note  {path} could be written at last", file=sys.stderr)
        return


@contextmanager
def held(path: Path, patience: float = 0.0, what: str = "") -> Iterator[None]:
    """While this process writes to a folder: nobody else may. They are told who it is, and ``what`` for."""
    try:
        lock = (path / "lock").open("a+")
    except OSError as error:
        raise WrongUse(f"{path} cannot be written to: {error.strerror}. Give another folder.") from None
    with lock as file:
        deadline = time.monotonic() + patience
        while not _locked(file):
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            file.seek(0)
            raise WrongUse(
                f"{path} is being trained by {file.read(200).strip() or 'another process'}. "
                "Wait for it, stop it, or give another folder."
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} {what}")
        file.flush()
        yield


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False


def _make(path: Path, exist_ok: bool = False) -> None:
    try:
        path.mkdir(parents=True, exist_ok=exist_ok)
    except OSError as error:
        if isinstance(error, FileExistsError) and not exist_ok:
            raise
        raise WrongUse(f"{path} cannot be made: {error.strerror}. Give another folder with --run.") from None
    except ValueError as error:  # a null byte
        raise WrongUse(f"{str(path)!r} cannot be made: {error}. Give another folder with --run.") from None


def read_settings(path: Path) -> dict[str, dict[str, Any]]:
    """The tables of a ``run.toml``."""
    advice = "Give the run.toml of a run's folder."
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            raise WrongUse(f"{path} is not a file. {advice}")
        read = from_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WrongUse(f"{path} is not there. {advice}") from None
    except OSError as error:
        raise WrongUse(f"{path} cannot be read: {error.strerror}. {advice}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML
        if isinstance(error, WrongUse):
            raise
        raise WrongUse(f"{path} is not valid TOML: {error}. Mend that line, or take the file of another run.") from None
    for name, table in read.items():
        if not isinstance(table, dict):
            raise WrongUse(f"{name!r} in {path} is not a table. {advice}")
    return read


def pause_of(rank: int, world: int) -> float:
    """For how many seconds a rank's steps may wait in its memory before they are written.

    The first rank's events are what recovery and certificate are made from, and the last one's, on another host if
    there are several, stand in for them: they are written at once. All others note the same, and ten thousand of them
    would be too many writes a step for a folder that all hosts share: at most about a hundred ranks write in a second.
    """
    return 0.0 if rank in (0, world - 1) else max(1.0, world / 100)


class EventLog:
    """Appends a rank's events, each flushed as it is written; what the disk does not take waits in memory.

    Steps may wait for a ``pause`` between two writes.
    """

    def __init__(self, run: Run, rank: int, pause: float = 0.0) -> None:
        self._pause, self._written = pause, time.monotonic()
        self._path = run.events_path(rank)
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

    def write(self, kind: str, **fields: Any) -> None:
        """A line, in one piece; with a checkpoint, all before it is on disk too."""
        line = json.dumps({"kind": kind, "time": time.time(), **plain(fields)}).encode() + b"\n"
        with self._lock:
            if len(self._waiting) + len(line) <= BACKLOG_BYTES:
                self._waiting += line
            else:
                self._lost += 1
            if kind != "step" or time.monotonic() >= self._written + self._pause:
                self._flush(sync=kind == "checkpoint")

    def _open(self) -> int:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _drop_cut_line(self._path)
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
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
        with suppress(OSError):
            print(f"   note  {self._path} {words}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """What the disk takes at last is written; what it does not is lost, and said to be."""
        with self._lock:
            self._flush(sync=False)
            if self._waiting:
                self._say(f"lacks {self._waiting.count(10)} events, for which there was no room to the end")
            if self._file is not None:
                os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.write("failure", reason=f"{type(error).__name__}: {error}")
        self.close()


def _drop_cut_line(path: Path) -> None:
    """What a killed rank had half written is no event."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb+") as file:
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
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return redact(str(value))
