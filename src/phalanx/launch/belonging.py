"""Whether a process runs a run, by what the system says of it: a signal is sent to no other.

What a run's folder says of processes may have been written by anybody. What a process has open, and which locks it
holds, only the system says.
"""

from __future__ import annotations

import os
import re
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from phalanx.errors import CannotHere


def holds(pid: int, lock: Path) -> bool:
    """Whether a process holds the lock that is this file, opened under this path: no link to it elsewhere."""
    path = lock.parent.resolve() / lock.name
    return any(at == path and "lock:" in said and " WRITE " in said for at, said in _open_files(pid))


def writes_in(pid: int, folder: Path) -> bool:
    """Whether a process has a file of a folder open to write to it."""
    root = folder.resolve()
    return any(at.is_relative_to(root) and _is_written(said) for at, said in _open_files(pid))


def ask(pid: int, number: int, belongs: Callable[[int], bool]) -> bool:
    """Send a process a signal if it belongs; whether it does. Its number cannot become another's meanwhile."""
    if not hasattr(os, "pidfd_open") or not Path("/proc/self/fd").is_dir():
        name = signal.Signals(number).name
        raise CannotHere(
            f"this system does not say what process {pid} has open, so that it may be another's. See that it is the "
            f"run's, then: kill -{name.removeprefix('SIG')} {pid}"
        )
    try:
        process = os.pidfd_open(pid)
    except (OSError, OverflowError):
        return False
    try:
        if not belongs(pid):
            return False
        signal.pidfd_send_signal(process, number)
        return True
    except ProcessLookupError:  # it has ended just now
        return False
    finally:
        os.close(process)


def refused(pid: int, lock: Path) -> str:
    """Why a process that a folder names is not signalled."""
    return (
        f"process {pid} does not hold {lock}, by what the system says, or is another user's: it is not ended from "
        f"here. If it runs this run all the same, end it yourself: kill {pid}"
    )


def _open_files(pid: int) -> Iterator[tuple[Path, str]]:
    """The regular files that a process has open, and what the system says of each; none, of another user's process."""
    folder = Path(f"/proc/{pid}/fd")
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError):  # closed meanwhile
                if stat.S_ISREG(os.stat(folder / name).st_mode):
                    yield Path(os.readlink(folder / name)), Path(f"/proc/{pid}/fdinfo/{name}").read_text()


def _is_written(said: str) -> bool:
    flags = re.search(r"^flags:\s*([0-7]+)$", said, re.MULTILINE)
    return flags is not None and int(flags[1], 8) & os.O_ACCMODE in (os.O_WRONLY, os.O_RDWR)
