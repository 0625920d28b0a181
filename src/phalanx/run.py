"""The Run: one run on disk. Every tool reads and writes this folder and nothing else.

runs/<name>/run.toml                   settings as resolved; ``phalanx train --config run.toml`` repeats the run
runs/<name>/origin/001/                what it is made of: source, git, versions
runs/<name>/events/rank-00000.jsonl    one JSON object a line: start, step, evaluation, checkpoint, failure, end
runs/<name>/events/host-00000.jsonl    likewise, of a host, by its first rank: processors, disks, network, GPUs
runs/<name>/flops.json                 what its model costs a sample, and what its devices can do
runs/<name>/flight/ stacks/ failures/   the last moments of ranks, and who failed
runs/<name>/evaluations.jsonl          what was measured of its checkpoints beside training
runs/<name>/answers/                   what its language model said at evaluations
runs/<name>/beforehand.safetensors     what a task wanted to know of its samples before the first step
runs/<name>/checkpoints/step-00000100/ committed or absent
runs/<name>/final/model.safetensors    full weights under the model's own names
runs/<name>/final/certificate.json     that every planned step was done, once, and what came of it
runs/<name>/report.html                all of it in pictures
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

from phalanx.errors import WrongUse
from phalanx.event_fields import is_event, is_index
from phalanx.files import exists, when_there_is_room, write_whole
from phalanx.folder_files import (
    FOLDER_MODE,
    BadFile,
    count,
    names,
    note,
    open_file,
    read_bytes,
    read_object,
    read_text,
    reading,
)
from phalanx.step_lines import filled
from phalanx.toml import from_toml, to_toml
from phalanx.words import in_bytes

Settings = Mapping[str, Any]
LAST_BYTES = 1 << 16
"""Of a log of events, in which its newest step is looked for."""
MOST_SETTINGS = 1 << 19
"""Bytes of a ``run.toml``."""
MOST_CERTIFICATE = 1 << 24
MOST_PROOF = 1 << 25
MOST_GENERATIONS = 1 << 31
MOST_LINE = 1 << 22
"""Bytes of an event; a longer line is none."""
MOST_LOG = 1 << 32
"""Bytes of a log of events, in which its newest generation is looked for."""
MOST_REST = 1 << 26
"""Bytes of such lines in a log of events, after which it is not read on."""


class Run:
    """A run's folder. `create` makes a new one; ``Run(path)`` opens one that is there."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

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
            raise WrongUse(f"{self.path} holds a run already. Go on with it by --resume, or give another --run.")

    def check_links(self) -> None:
        """Refuse a folder in which something is a link, which nothing here follows; checkpoints may lie elsewhere."""
        for name in names(self.path, self.path, os.DirEntry.is_symlink) if self.path.is_dir() else ():
            if name != self.checkpoints_path.name:
                raise WrongUse(
                    f"{self.path / name} is a link, which is not followed. Put what it leads to in its place; "
                    "checkpoints alone may lie elsewhere, by --checkpoints or by a link."
                )

    @property
    def in_shell(self) -> str:
        """Its folder as a word of a command that somebody may copy into a shell."""
        return shlex.quote(str(self.path))

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

    def proof_folders(self, began: str | Path) -> list[Path]:
        """Where proofs of it may lie: beside its own folder, and under ``runs/`` of the one that it began in."""
        return list(dict.fromkeys([self.path.parent.absolute(), (Path(began) / "runs").absolute()]))

    def certificate(self) -> dict[str, Any] | None:
        """What `certificate_path` holds; None if the run is not finished, `BadFile` if it is no certificate."""
        try:
            found = read_object(self.path, self.certificate_path, MOST_CERTIFICATE)
        except FileNotFoundError:
            return None
        count(found, "steps", self.certificate_path)
        return found

    def certified_steps(self) -> int | None:
        """How long the run is if it is finished; None if it is not."""
        found = self.certificate()
        return None if found is None else count(found, "steps", self.certificate_path)

    def certified_hash(self) -> str | None:
        """The hash of the final weights if it is finished; None if it is not."""
        found = self.certificate()
        return None if found is None or "hash" not in found else str(found["hash"])

    def certified_plan(self) -> int | None:
        """How many steps were planned, if the run is finished; a callback may have ended it before the last."""
        found = self.certificate()
        return None if found is None else count({"planned": found["steps"], **found}, "planned", self.certificate_path)

    def final_step(self) -> int | None:
        """The step whose weights are left in ``final``, if the run is finished: the last, or the best by a measure."""
        found = self.certificate()
        if found is None:
            return None
        best = found.get("best")
        if not best:
            return count(found, "steps", self.certificate_path)
        return count(best if isinstance(best, dict) else {}, "step", self.certificate_path)

    def held(self, patience: float = 0.0, purpose: str = "") -> AbstractContextManager[None]:
        """While this process runs the run: nobody else may."""
        return held(self.path, patience, purpose)

    def generation(self) -> int:
        """The number of the last set of ranks of this run: each start of them is a generation."""
        path = self.path / "generation"
        try:
            found = int(read_text(self.path, path, 100))
            if not 0 <= found < MOST_GENERATIONS:
                raise ValueError(f"{found} is no generation")
            return found
        except (FileNotFoundError, ValueError) as error:
            noted = max((event.get("generation", 0) for event in self.events(0, "start", newest=MOST_LOG)), default=0)
            if isinstance(error, ValueError):
                note(f"{path} is damaged; the run's events know of generation {noted}")
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

    def committed(self) -> dict[int, str]:
        """By step, the hash of the weights of each checkpoint that was committed and not gone back behind since."""
        found: dict[int, str] = {}
        for event in self.events(0, "start", "rollback", "checkpoint") if self.path.is_dir() else ():
            step, noted = event.get("step", 0), event.get("hash")
            if event["kind"] != "checkpoint":
                found = {known: noted for known, noted in found.items() if known <= step}
            elif "failed" not in event:  # a rescued one was noted without a hash
                found.pop(step, None)
                found |= {step: noted} if isinstance(noted, str) else {}
        return found

    def ledger(self, rank: int = 0) -> dict[int, dict[str, Any]]:
        """The steps that led to where the run stands; one that was done again counts as it was last done."""
        return counted(self.events(rank))

    def last_step(self) -> dict[str, Any] | None:
        """The newest step of rank 0's events, looked for at their end alone."""
        try:
            with reading(self.path, self.events_path(0)) as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - LAST_BYTES))
                lines = file.read(LAST_BYTES).split(b"\n")
        except OSError:
            return None
        found = (event_of(line) for line in reversed(lines[:-1]) if line.startswith(b'{"kind": "step"'))
        return next((event for event in found if event is not None), None)

    def events_path(self, rank: int) -> Path:
        return self.path / "events" / f"rank-{rank:05d}.jsonl"

    def write_settings(self, settings: Mapping[str, Settings]) -> None:
        """Write ``run.toml``, a table a section, for the user and their group. Values that are None are left out."""
        text = to_toml(settings)
        if len(text.encode()) > MOST_SETTINGS:
            raise WrongUse(
                f"the task's settings take {in_bytes(len(text.encode()))}, and run.toml has room for "
                f"{in_bytes(MOST_SETTINGS)}. Keep what is large in a file, and give its name to the task."
            )
        write_whole(self.settings_path, text)

    def settings(self) -> dict[str, dict[str, Any]]:
        """The tables of its ``run.toml``."""
        return read_settings(self.settings_path, self.path)

    def summary(self) -> tuple[str, str, int]:
        """Its task, its layout and how many steps are planned, as far as ``run.toml`` says so."""
        return summary(self.settings() if exists(self.settings_path) else {})

    def task(self) -> str:
        """What it trains, by its own word."""
        task = self.settings().get("run", {}).get("task")
        if not isinstance(task, str):
            raise WrongUse(
                f"{self.settings_path} does not say what was trained: it was cut short, perhaps. Restore it, or begin "
                "a run in another folder."
            )
        return task

    def events(self, rank: int, *kinds: str, newest: int | None = None) -> Iterator[dict[str, Any]]:
        """What a rank wrote, in order, if anything; of these kinds, or all. What was cut short is no event.

        ``newest``: of a log with more bytes only so many, the last.
        """
        if not self.path.is_dir():
            raise WrongUse(f"{self.path} is not there. Give the folder of a run, such as runs/gpt-001.")
        return filled(self._read_events(rank, kinds, newest))

    def _read_events(self, rank: int, kinds: Sequence[str], newest: int | None) -> Iterator[dict[str, Any]]:
        path = self.events_path(rank)
        begins = tuple(f'{{"kind": "{kind}"'.encode() for kind in kinds) or (b"{",)  # a long log is not parsed for few
        try:
            with reading(self.path, path) as file:
                if newest is not None and (size := os.fstat(file.fileno()).st_size) > newest:
                    note(f"{path} has {in_bytes(size)}: of these the last {in_bytes(newest)} are looked at")
                    file.seek(size - newest)
                    next(whole_lines(file, path), None)  # the rest of a line
                for line in whole_lines(file, path):
                    if line.startswith(begins) and (event := object_of(line)) is not None:
                        if is_event(event):
                            yield event
                        else:
                            note(f"{path} has lines that are no events: they are left out")
        except FileNotFoundError:
            return


def whole_lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """The lines of a log that end, but for those that are too long to be one."""
    rest = 0
    while line := file.readline(MOST_LINE):
        if line.endswith(b"\n"):
            yield line
            continue
        while line and not line.endswith(b"\n"):
            rest += len(line)
            if rest > MOST_REST:
                note(f"{path} has {in_bytes(rest)} that are no lines: it is not read on")
                return
            line = file.readline(MOST_LINE)


def event_of(line: bytes) -> dict[str, Any] | None:
    """The event that a line of a log is; None where it was cut short by a full disk, or is something else."""
    found = object_of(line)
    return found if found is not None and is_event(found) else None


def object_of(line: bytes) -> dict[str, Any] | None:
    """The JSON object that a line is, if it is one."""
    try:
        found = json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def counted(events: Iterable[dict[str, Any]], rounds: bool = False) -> dict[int, dict[str, Any]]:
    """Of a rank's events in order, the steps that count (`Run.ledger`); or ``rounds`` of sites, by the last of them."""
    done: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["kind"] in ("start", "rollback"):
            done = {step: known for step, known in done.items() if step < event.get("step", 0)}
        elif event["kind"] == "round" if rounds else event["kind"] in ("step", "left out") and "samples" in event:
            done[event["step"]] = event
    return done


class FolderHeld(WrongUse):
    """Another process writes to a folder; ``purpose`` is what it says it does so for."""

    def __init__(self, path: Path, holder: str) -> None:
        """``holder``: as the folder's lock names it, ``process 12 on node1 for the rendezvous at node1:29400``."""
        who = holder or "another process"
        super().__init__(f"{path} is being trained by {who}. Wait for it, stop it, or give another folder.")
        self.holder, self.purpose = " ".join(who.split()[:4]), "".join(holder.split(maxsplit=4)[4:])


@contextmanager
def held(path: Path, patience: float = 0.0, purpose: str = "", within: Path | None = None) -> Iterator[None]:
    """While this process writes to a folder: nobody else may. They are told who it is, and what for.

    ``within``: the folder that it is in, between which and it no link is followed.
    """
    try:
        lock = _opened_lock(path, within, "r+")
    except OSError as error:
        raise WrongUse(f"{path} cannot be written to: {error.strerror}. Give another folder.") from None
    with lock as file:
        deadline = time.monotonic() + patience
        while not _locked(file):
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            file.seek(0)
            raise FolderHeld(path, file.read(200).strip())
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} {purpose}")
        file.flush()
        yield


def holder(folder: Path, within: Path | None = None) -> str:
    """Who holds a folder at this moment, as its lock says: ``process 12 on node1``; "": nobody."""
    try:
        lock = _opened_lock(folder, within, "r")
    except OSError:
        return ""
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return " ".join(file.read(200).split()[:4]) or "another process"
    return ""


def _opened_lock(folder: Path, within: Path | None, mode: str) -> IO[str]:
    flags = os.O_RDONLY if mode == "r" else os.O_RDWR | os.O_CREAT
    return os.fdopen(open_file(within or folder, folder / "lock", flags), mode, encoding="utf-8", errors="replace")


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False


def _make(path: Path, exist_ok: bool = False) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(FOLDER_MODE, exist_ok=exist_ok)
    except OSError as error:
        if isinstance(error, FileExistsError) and not exist_ok:
            raise
        raise WrongUse(f"{path} cannot be made: {error.strerror}. Give another folder with --run.") from None
    except ValueError as error:  # a null byte
        raise WrongUse(f"{str(path)!r} cannot be made: {error}. Give another folder with --run.") from None


def short_name(reference: str) -> str:
    """What a run of a task is called by: the name of its recipe, file or module."""
    file = reference.partition(":")[0]
    return Path(file).stem if file.endswith(".py") else file.rpartition(".")[2]


def summary(settings: Mapping[str, Settings]) -> tuple[str, str, int]:
    """The task, the layout and how many steps are planned, as far as the tables of a ``run.toml`` say so."""
    said, planned = settings.get("run", {}), settings.get("settings", {}).get("steps", 0)
    return str(said.get("task", "?")), str(said.get("layout", "?")), planned if is_index(planned) else 0


def read_settings(path: Path, within: Path | None = None) -> dict[str, dict[str, Any]]:
    """The tables of a ``run.toml``; ``within``: its run's folder, which is left by no link."""
    advice = "Give the run.toml of a run's folder."
    try:
        at = path if within is not None else Path(os.path.realpath(path))
        read = from_toml(read_bytes(within or at.parent, at, MOST_SETTINGS).decode())
    except FileNotFoundError:
        raise WrongUse(f"{path} is not there. {advice}") from None
    except BadFile as bad:
        raise WrongUse(f"{path} {bad.what}. {advice}") from None
    except OSError as error:
        raise WrongUse(f"{path} cannot be read: {error.strerror}. {advice}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML
        raise WrongUse(f"{path} is not valid TOML: {error}. Mend that line, or take the file of another run.") from None
    for name, table in read.items():
        if not isinstance(table, dict):
            raise WrongUse(f"{name!r} in {path} is not a table. {advice}")
    return read
