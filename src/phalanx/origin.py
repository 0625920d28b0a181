"""What a run is made of, kept in its folder: the user's source, their git commit and diff, versions, settings.

runs/<name>/origin/001/origin.json    versions, packages, git, and every file of the user's with its hash
runs/<name>/origin/001/source/        copies of those files, as modules
runs/<name>/origin/001/git.diff       what was not committed of all Python files
runs/<name>/origin/001/run.toml       the settings

An attempt that finds all as it was writes nothing; one that does not gets the next number. Secrets are
taken out as far as they are known, or names and forms tell them.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from phalanx import __version__, user_code
from phalanx.events import say
from phalanx.files import make_folders, opened
from phalanx.redact import learn_task, redact, redact_source, redact_words
from phalanx.run import Run
from phalanx.task import Task

MOST_BYTES, MOST_OF_A_FILE, MOST_FILES = 16 << 20, 1 << 20, 2000
"""What is copied at most."""
GIT_SECONDS = 2.0
NAME = "origin.json"


class Origin:
    """What one attempt at a run is made of."""

    def __init__(self, run: Run, task: Task) -> None:
        self.run, self.home = run, user_code.home(type(task))
        learn_task(task)
        self.folder: Path | None = None
        self._copied: dict[str, Any] = {}

    def write(self) -> None:
        """Write it down, if it is not there already."""
        git, diff = _git(self.home)
        found = {
            "phalanx": __version__, "python": platform.python_version(),
            "torch": torch.__version__, "platform": platform.platform(), "packages": packages(), "git": git,
            "started_in": str(Path.cwd()), "command": shlex.join(redact_words(sys.argv)),
        }  # fmt: skip
        settings = self.run.settings_path.read_text() if self.run.settings_path.exists() else ""
        here = {str(path): known for path, known in user_code.hashes().items()}
        folders = (path for path in (self.run.path / "origin").glob("[0-9]*") if path.name.isdigit())
        every = sorted(path for path in folders if (path / NAME).is_file())
        if every and _same(every[-1], found, settings, diff, here):
            self.folder = every[-1]
            self._copied = _read(self.folder)["files"]
            return
        number = 1 + max((int(path.name) for path in every), default=0)
        self.folder = self.run.path / "origin" / f"{number:03d}"
        unfinished = self.folder.with_name(f"{self.folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            make_folders(unfinished)
            _put(unfinished / "run.toml", settings)
            if diff:
                _put(unfinished / "git.diff", diff)
            self._copy(unfinished)
            _put(unfinished / NAME, json.dumps({"time": time.time(), **found, "files": self._copied}, indent=1) + "\n")
            shutil.rmtree(self.folder, ignore_errors=True)
            unfinished.replace(self.folder)
        except OSError:  # the last room on a disk is for checkpoints
            self.folder = None
            shutil.rmtree(unfinished, ignore_errors=True)
            raise

    def complete(self) -> None:
        """Add what was imported since."""
        if self.folder is None or all(str(path) in self._copied for path in user_code.modules().values()):
            return
        found = _read(self.folder)
        self._copy(self.folder)
        _put(self.folder / NAME, json.dumps({**found, "files": self._copied}, indent=1) + "\n")

    def _copy(self, folder: Path) -> None:
        """Files of the user's that are not copied yet, as far as there is room for them."""
        room = MOST_BYTES - sum(known["bytes"] for known in self._copied.values() if known["copy"])
        hashes = user_code.hashes()
        for name, path in sorted(user_code.modules().items()):
            if str(path) in self._copied or len(self._copied) >= MOST_FILES:
                continue
            copy, size, text = None, 0, None
            with suppress(OSError, UnicodeDecodeError):
                size = path.stat().st_size
                small = path.suffix == ".py" and size <= min(room, MOST_OF_A_FILE)
                if small and hashes.get(path) == user_code.file_hash(path):  # else it was edited since
                    text = path.read_text(encoding="utf-8")
            if text is not None:
                copy = _place(name, path, {known["copy"] for known in self._copied.values()})
                _put(folder / "source" / copy, redact_source(text))
                room -= size
            self._copied[str(path)] = {"module": name, "sha256": hashes.get(path), "bytes": size, "copy": copy}


@contextmanager
def kept_origin(run: Run, task: Task) -> Iterator[None]:
    """Written now, and completed at the end by what was imported meanwhile. A run goes on without it, and says so."""
    origin = Origin(run, task)
    try:
        try:
            origin.write()
        except (OSError, ValueError) as error:
            say(f"   note  what the run is made of cannot be written to {run.path / 'origin'}: {error}", sys.stderr)
        yield
    finally:
        with suppress(OSError, ValueError):
            origin.complete()


def _place(name: str, path: Path, taken: set[str]) -> str:
    """Where a module is copied to, so that it can be imported from there."""
    parts = (path.stem,) if "." not in name else tuple(name.split("."))
    if path.stem == "__init__":
        parts = (*name.split("."), "__init__")
    place = f"{'/'.join(parts)}.py"
    number = 1
    while place in taken:
        number += 1
        place = f"{'/'.join(parts)}.{number}.py"
    return place


def _same(folder: Path, found: Mapping[str, Any], settings: str, diff: str, files: Mapping[str, str]) -> bool:
    try:
        known = _read(folder)
        kept = (folder / "git.diff").read_bytes() if (folder / "git.diff").exists() else b""
        if (folder / "run.toml").read_bytes() != settings.encode() or kept != diff.encode():
            return False
    except (OSError, ValueError):
        return False
    if any(known.get(name) != value for name, value in found.items() if name not in ("started_in", "command")):
        return False
    then = {path: entry["sha256"] for path, entry in known["files"].items()}
    return all(then.get(path) == value for path, value in files.items())


def _read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / NAME).read_text())
    return found


def _put(path: Path, text: str) -> None:
    make_folders(path.parent)
    with opened(path, "w") as file:
        file.write(text)


def packages() -> dict[str, str]:
    """Every installed package with its version, by the names of their folders: nothing is opened."""
    found: dict[str, str] = {}
    for folder in sys.path:
        with suppress(OSError):
            for entry in os.scandir(folder or "."):
                name, dash, version = entry.name.removesuffix(".dist-info").removesuffix(".egg-info").partition("-")
                if dash and entry.name.endswith((".dist-info", ".egg-info")):
                    found.setdefault(name, version)
    return dict(sorted(found.items()))


def _git(folder: Path) -> tuple[dict[str, Any] | None, str]:
    """The commit that a folder is at, and what is not committed; None where there is no repository."""
    root = _asked(folder, "rev-parse", "--show-toplevel")
    commit = _asked(folder, "rev-parse", "HEAD")
    if not root or not commit:
        return None, ""
    asked = _asked(folder, "diff", "--no-ext-diff", "--no-textconv", "HEAD", "--", "*.py")
    diff = redact_source(asked or "")
    told = {
        "root": root, "commit": commit, "branch": _asked(folder, "rev-parse", "--abbrev-ref", "HEAD"),
        "remote": redact(_asked(folder, "remote", "get-url", "origin") or ""),
        "changed": None if asked is None else bool(diff),  # None: git took too long to say
        "cut": len(diff) >= MOST_OF_A_FILE,
    }  # fmt: skip
    return told, diff


def _asked(folder: Path, *words: str) -> str | None:
    """What git says, up to a limit and in a moment; nothing where it says no, None where it takes too long."""
    try:
        asked = subprocess.Popen(
            ["git", *words], cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )  # fmt: skip
    except OSError:  # there is no git
        return ""
    with asked:
        late = threading.Timer(GIT_SECONDS, asked.kill)
        late.start()
        try:
            assert asked.stdout is not None
            found = asked.stdout.read(MOST_OF_A_FILE)
            cut = len(found) == MOST_OF_A_FILE
            if cut:
                asked.kill()
            code = asked.wait()
        finally:
            late.cancel()
    if code == -signal.SIGKILL and not cut:
        return None
    return found.decode(errors="replace").rstrip("\n") if cut or not code else ""
