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
import socket
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from phalanx.errors import WrongUse
from phalanx.files import exists, when_there_is_room, write_whole
from phalanx.step_lines import filled
from phalanx.toml import from_toml, to_toml

Settings = Mapping[str, Any]
LAST_BYTES = 1 << 16
"""Of a log of events, in which its newest step is looked for."""


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

    def certified_steps(self) -> int | None:
        """How long the run is if it is finished; None if it is not."""
        try:
            return int(json.loads(self.certificate_path.read_text())["steps"])
        except (OSError, ValueError, KeyError):
            return None

    def certified_plan(self) -> int | None:
        """How many steps were planned, if the run is finished; a callback may have ended it before the last."""
        try:
            found = json.loads(self.certificate_path.read_text())
            return int(found.get("planned", found["steps"]))
        except (OSError, ValueError, KeyError):
            return None

    def held(self, patience: float = 0.0, purpose: str = "") -> AbstractContextManager[None]:
        """While this process runs the run: nobody else may."""
        return held(self.path, patience, purpose)

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
        return counted(self.events(rank))

    def last_step(self) -> dict[str, Any] | None:
        """The newest step of rank 0's events, looked for at their end alone."""
        try:
            with self.events_path(0).open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - LAST_BYTES))
                lines = file.read().split(b"\n")
        except OSError:
            return None
        for line in reversed(lines[:-1]):
            if line.startswith(b'{"kind": "step"'):
                with suppress(ValueError):
                    found: dict[str, Any] = json.loads(line)
                    return found
        return None

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
        if not self.path.is_dir():
            raise WrongUse(f"{self.path} is not there. Give the folder of a run, such as runs/gpt-001.")
        return filled(self._read_events(rank, kinds)) if self.events_path(rank).exists() else iter(())

    def _read_events(self, rank: int, kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
        begins = tuple(f'{{"kind": "{kind}"' for kind in kinds) or ("{",)  # a long run's log is not parsed for a few
        with self.events_path(rank).open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith(begins) and line.endswith("\n"):
                    with suppress(ValueError):  # cut by a full disk
                        yield json.loads(line)


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
def held(path: Path, patience: float = 0.0, purpose: str = "") -> Iterator[None]:
    """While this process writes to a folder: nobody else may. They are told who it is, and what for."""
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
            raise FolderHeld(path, file.read(200).strip())
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} {purpose}")
        file.flush()
        yield


def holder(folder: Path) -> str:
    """Who holds a folder at this moment: ``process 12 on node1``; "": nobody."""
    with suppress(OSError), (folder / "lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return " ".join(file.read(200).split()[:4]) or "another process"
    return ""


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


def short_name(reference: str) -> str:
    """What a run of a task is called by: the name of its recipe, file or module."""
    file = reference.partition(":")[0]
    return Path(file).stem if file.endswith(".py") else file.rpartition(".")[2]


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
