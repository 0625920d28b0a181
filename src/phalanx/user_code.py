"""The user's own code: modules that were imported from outside of installed packages, and what their files hold.

A module that is imported late, in a task's ``model()`` or ``data()``, is not known before. So what was known once is
kept as files with their hashes, and held against what those files hold now (`changed`).
"""

from __future__ import annotations

import hashlib
import inspect
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from types import TracebackType

OWN = Path(__file__).resolve().parent
AS_USERS = tuple(str(OWN / name) + os.sep for name in ("models", "recipes"))
"""Of ours, what is written as users write theirs."""
THROUGH = tuple(
    str(OWN / name)
    for name in ("logits.py", "parallel/randomness/answers.py", "prove/reference/steady.py", "train/widened.py")
)
"""Of ours, where calls of torch's functions come by, whoever makes them."""

_read: dict[int, tuple[object, str]] = {}
"""What a module's file held when it was first asked for: what is edited later is not what runs here."""


def modules() -> dict[str, Path]:
    """By name, the files of all modules of the user's that have been imported so far."""
    return {name: path for name, path, _ in _imported()}


def _imported() -> Iterator[tuple[str, Path, object]]:
    """With each, what is another object when it is imported anew."""
    for name, module in list(sys.modules.items()):
        inside = getattr(module, "__dict__", {})  # not asked by name: some modules import what they are asked for
        file = inside.get("__file__")
        if isinstance(file, str) and is_users(file):
            yield name, Path(file).resolve(), inside.get("__spec__") or module


def hashes() -> dict[Path, str]:
    """By file, what the modules hold that have been imported."""
    found = {}
    for _, path, mark in _imported():
        known = _read.get(id(mark))
        if known is None or known[0] is not mark:
            known = _read[id(mark)] = mark, file_hash(path) or ""
        found[path] = known[1]
    return found


def remember() -> None:
    """Note what the modules that have been imported hold: it is what runs, whatever is edited from now on."""
    hashes()


def is_users(file: str) -> bool:
    """Whether a file is neither Python's, nor an installed package's, nor ours."""
    if not file or file.startswith("<"):
        return False
    path = os.path.abspath(file)
    parts = path.split(os.sep)
    if "site-packages" in parts or "dist-packages" in parts or path.startswith(_installed()):
        return False
    return not os.path.realpath(path).startswith(_installed())


@lru_cache(maxsize=4096)
def is_users_line(file: str) -> bool:
    """Whether lines of a file are shown as the user's: theirs, a notebook's cell, a recipe's or a model's of ours."""
    if file.startswith("<"):
        return file.startswith(("<ipython", "<stdin"))
    return is_users(file) or os.path.realpath(file).startswith(AS_USERS)


def is_ours(file: str) -> bool:
    """Whether a file is ours, also one that is written as users write theirs."""
    return os.path.realpath(file).startswith(f"{OWN}{os.sep}")


def asks() -> bool:
    """Whether the function of torch's that runs now was called by the user's code, or a package's, and not by ours."""
    frame = sys._getframe(1)
    while frame is not None:
        whose = _whose(frame.f_code.co_filename)
        if whose is not None:
            return whose
        frame = frame.f_back  # type: ignore[assignment]
    return False


@lru_cache(maxsize=4096)
def _whose(file: str) -> bool | None:
    """Whether a file is the user's or a package's; None: torch's or Python's, which were called in between."""
    path = os.path.realpath(file)
    torch = os.path.dirname(os.path.realpath(sys.modules["torch"].__file__ or "torch"))
    if path in THROUGH or path.startswith(torch + os.sep):
        return None
    if is_users_line(file) or is_ours(file):
        return is_users_line(file)
    return True if {"site-packages", "dist-packages"} & {*path.split(os.sep)} else None


@cache
def _installed() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
    folders = {sysconfig.get_path(name) for name in names} | {site.getusersitepackages(), str(OWN)}
    return tuple({f"{place}{os.sep}" for folder in folders for place in (folder, os.path.realpath(folder))})


def home(kind: type) -> Path:
    """The folder that a class of the user's is in, which its files are named from; this one, if it is not theirs."""
    file = file_of(kind)
    return Path.cwd() if file is None else file.parent


def file_of(kind: type) -> Path | None:
    """The file of a class, or of the first of its bases that is in one of the user's."""
    for base in kind.__mro__:
        with suppress(TypeError, OSError):
            file = inspect.getfile(base)
            if is_users(file):
                return Path(file).resolve()
    return None


def snapshot(base: Path, others: Iterable[str] = ()) -> dict[str, str]:
    """The files of all modules of the user's, by their paths from ``base``, with a hash of what each holds.

    ``others``: files of modules that another process has imported.
    """
    every = {path: file_hash(path) or "" for path in map(Path, others)} | hashes()
    return dict(sorted((os.path.relpath(path, base), known) for path, known in every.items() if known))


def changed(files: Mapping[str, str], base: Path) -> list[str]:
    """Of files that were known once, those that hold something else now, or are not there any more."""
    here = hashes()
    now = ((name, (base / name).resolve(), known) for name, known in files.items())
    return [name for name, path, known in now if (here[path] if path in here else file_hash(path)) != known]


def joined(files: Mapping[str, str]) -> str:
    """One short hash for all, Phalanx's own source among them."""
    found = hashlib.sha256(own_hash().encode())
    for name, known in sorted(files.items()):
        found.update(f"{name}\n{known}\n".encode())
    return found.hexdigest()[:16]


@cache
def own_hash() -> str:
    """Of Phalanx's source."""
    found = hashlib.sha256()
    for file in sorted(OWN.rglob("*.py")):
        with suppress(OSError):  # it cannot be imported either
            found.update(file.read_bytes() if file.is_file() else b"")  # an editor leaves links to nowhere
    return found.hexdigest()[:16]


def file_hash(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else None
    except OSError:
        return None


def innermost(trace: TracebackType | Iterable[traceback.FrameSummary] | None) -> traceback.FrameSummary | None:
    """The last frame of a traceback that is in a file of the user's, if any is."""
    frames = traceback.extract_tb(trace) if isinstance(trace, TracebackType) or trace is None else trace
    theirs = [frame for frame in frames if is_users_line(frame.filename)]
    return theirs[-1] if theirs else None


def is_root(file: str, name: str) -> bool:
    """Whether a function is where a rank begins: what called it is the warm process's that forked it."""
    return name == "_rank" and file == str(OWN / "launch" / "local.py")


def place(file: str | Path, line: int | None) -> str:
    """File and line, from here if it is below."""
    path = Path(file).resolve()
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{line}"
