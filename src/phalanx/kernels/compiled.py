"""C and C++ that lie beside a module, compiled when they are first used: once for a host, its processor and its flags.

What is built is kept in the folder of torch's extensions, which several processes and hosts of one user may share, or
elsewhere if others could put code there (`own_folder`), which a warning says. Where it cannot be had,
the plain twin is used, and a warning says so.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TypeVar

from phalanx.kernels.own_folder import others_in, own_folder

COMPILERS = {".c": ("CC", "cc", "a C compiler and Python's headers"), ".cpp": ("CXX", "c++", "a C++ compiler")}
"""By suffix: the variable that names one, what is taken otherwise, and what it is."""
LOOK_SECONDS = 0.02
Found = TypeVar("Found")


def built(source: Path, flags: Sequence[str], headers: Sequence[str] = (), seconds: float = 600.0) -> Path:
    """What is compiled of a file, and of headers beside it, by whoever comes first.

    `RuntimeError`: it cannot be, or not in so many seconds. ``headers``: folders of what else it includes, which may
    lie elsewhere on another host; what they hold, the flags say.
    """
    read = [path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h")))]
    words = [*flags, platform.machine(), *platform.libc_ver()]
    told = hashlib.sha256(b"\0".join([*read, *map(str.encode, words)])).hexdigest()[:16]
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    folder = own_folder(Path(root), f"phalanx_{source.stem}_{told}")
    whole = folder / "whole.so"
    if os.path.lexists(whole) and others_in(whole):  # from when others could write here
        whole.unlink()
    if whole.exists():
        return whole
    deadline = time.monotonic() + seconds
    with (folder / "building").open("w") as lock:
        _locked(lock, deadline, seconds)
        if not whole.exists():
            _compile(source, [*flags, *(f"-I{path}" for path in headers)], whole, lock, deadline)
    return whole


def loaded(source: Path, load: Callable[[], Found], instead: str) -> Found | None:
    """What ``load`` gives; None: it fails, and a warning says why, and what is done ``instead``."""
    try:
        return load()
    except NotYet as error:
        warnings.warn(f"{instead} this time: {error}, and the next start has it. Nothing is to be done.", stacklevel=3)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        warnings.warn(
            f"{instead}: compiled code cannot be had ({reason}). Install {COMPILERS[source.suffix][2]}.",
            stacklevel=3,
        )
    return None


class NotYet(RuntimeError):
    """It is being built."""


def _locked(lock: IO[str], deadline: float, seconds: float) -> None:
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise NotYet(f"another process builds compiled code for longer than {seconds:g} s") from None
            time.sleep(LOOK_SECONDS)


def _compile(source: Path, flags: Sequence[str], whole: Path, lock: IO[str], deadline: float) -> None:
    """The folder may be of several hosts, and the lock of one: each builds apart, and what is whole is moved in place.

    What takes longer goes on with the lock, and is there for the next who asks.
    """
    variable, usual, _ = COMPILERS[source.suffix]
    compiler = shlex.split(os.environ.get(variable) or usual)
    if shutil.which(compiler[0]) is None:
        raise RuntimeError(f"there is no {compiler[0]}")
    handle, own = tempfile.mkstemp(".so", "unfinished-", whole.parent)
    os.close(handle)
    command = [*compiler, "-shared", "-fPIC", *flags, str(source), "-o", own]
    script = 'own=$1 whole=$2; shift 2; "$@" && chmod 700 "$own" && mv -f "$own" "$whole" || { rm -f "$own"; exit 1; }'
    with tempfile.TemporaryFile("w+") as said:
        building = subprocess.Popen(
            ["/bin/sh", "-c", script, "sh", own, str(whole), *command], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=said, pass_fds=[lock.fileno()], start_new_session=True,
        )  # fmt: skip
        try:
            code = building.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            building.returncode = 0  # nobody waits for it
            raise NotYet("compiled code is still being built") from None
        said.seek(0)
        lines = said.read().splitlines()
    if code:
        wrong = [line for line in lines if "error" in line] or lines or [f"exit code {code}"]
        raise RuntimeError(f"{compiler[0]}: {wrong[0].strip()}")
