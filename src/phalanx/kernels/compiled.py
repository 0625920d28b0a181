"""C and C++ that lie beside a module, compiled when they are first used: once for a host, its processor and its flags.

What is built is kept in the folder of torch's extensions, which several processes and hosts may share. Where it cannot
be had, the plain twin is used and a warning says so.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TypeVar

COMPILERS = {".c": ("CC", "cc", "a C compiler and Python's headers"), ".cpp": ("CXX", "c++", "a C++ compiler")}
"""By suffix: the variable that names one, what is taken otherwise, and what it is."""
LOOK_SECONDS = 0.02
Found = TypeVar("Found")


def built(source: Path, flags: Sequence[str], headers: Sequence[str] = (), seconds: float = 600.0) -> Path:
    """What is compiled of a file, by whoever comes first; `RuntimeError`: it cannot be, or not in so many seconds.

    ``headers``: folders of what it includes, which may lie elsewhere on another host; what they hold, the flags say.
    """
    words = [*flags, platform.machine(), *platform.libc_ver()]
    told = hashlib.sha256(source.read_bytes() + "\0".join(words).encode()).hexdigest()[:16]
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    folder = Path(root) / f"phalanx_{source.stem}_{told}"
    whole = folder / "whole.so"
    if whole.exists():
        return whole
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    with (folder / "building").open("w") as lock:
        _locked(lock, deadline, seconds)
        if not whole.exists():
            # the folder may be of several hosts, and the lock of one: each builds apart, and the first one's is used
            with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as own:
                new = Path(own) / "built.so"
                _compile(source, [*flags, *(f"-I{path}" for path in headers)], new, deadline, seconds)
                if not whole.exists():
                    new.replace(whole)
    return whole


def loaded(source: Path, load: Callable[[], Found], instead: str) -> Found | None:
    """What ``load`` gives; None: it fails, and a warning says why, and what is done ``instead``."""
    try:
        return load()
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        warnings.warn(
            f"{instead}: compiled code cannot be had ({reason}). Install {COMPILERS[source.suffix][2]}.",
            stacklevel=3,
        )
        return None


def _locked(lock: IO[str], deadline: float, seconds: float) -> None:
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise RuntimeError(f"another process did not build it in {seconds:g} s") from None
            time.sleep(LOOK_SECONDS)


def _compile(source: Path, flags: Sequence[str], to: Path, deadline: float, seconds: float) -> None:
    variable, usual, _ = COMPILERS[source.suffix]
    compiler = shlex.split(os.environ.get(variable) or usual)
    command = [*compiler, "-shared", "-fPIC", *flags, str(source), "-o", str(to)]
    try:
        left = max(0.1, deadline - time.monotonic())
        done = subprocess.run(command, capture_output=True, text=True, timeout=left, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{compiler[0]} took more than {seconds:g} s") from None
    except OSError as error:
        raise RuntimeError(f"{compiler[0]}: {error.strerror}") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or [""]
        raise RuntimeError(f"{compiler[0]}: {lines[0].strip()}")
