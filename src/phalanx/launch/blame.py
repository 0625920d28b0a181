"""What the end of a rank says of itself and of others: one line, and whether it only lost sight of those."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from phalanx.errors import CannotHere, WrongUse
from phalanx.torch_errors import About, is_about
from phalanx.traces import Traced

COUNTED = Path("/proc/vmstat")
"""Where Linux counts, for the whole machine, what it does about memory."""


def reason(error: Exception) -> str:
    """One line on an error."""
    text = str(error)
    first = text.splitlines()[0] if text else ""
    if _refused(error):
        return text
    if is_about(error, About.FORK):
        return (
            f"cannot compute, since the task's file does when it is imported ({first[:80]}). Move that into model() or "
            "data(), or under a main guard"
        )
    if _waited(error):
        return f"waited for another rank until its time was up ({first[:80]}); look at the others first"
    if _lost(error):
        return "lost its connection to a rank that ended"
    if isinstance(error, Traced):
        return first
    return f"{type(error).__name__}: {first}" if text else type(error).__name__


def secondary(error: Exception) -> bool:
    """Whether something happened to another rank, which this one lost or waited for."""
    return not _refused(error) and (_waited(error) or _lost(error))


def timed_out(error: Exception) -> bool:
    """Whether it waited for another rank until its time was up."""
    return not _refused(error) and _waited(error)


def worker_killed(error: Exception) -> bool:
    """Whether a process that reads data for this one was killed."""
    return not _refused(error) and is_about(error, About.WORKER)


def _refused(error: Exception) -> bool:
    return isinstance(error, (WrongUse, CannotHere))


def _waited(error: Exception) -> bool:
    """Also where NCCL then aborted."""
    return isinstance(error, RuntimeError) and is_about(error, About.WAITED)


def _lost(error: Exception) -> bool:
    gone = isinstance(error, RuntimeError) and is_about(error, About.GONE)
    return gone or isinstance(error, dist.DistNetworkError)


def ended_by(number: int, starved: bool | None = None) -> tuple[str, bool]:
    """One line on a signal, and whether another rank may be its cause: NCCL's watchdog aborts when it misses one.

    ``starved``: whether the system has since ended a process for want of memory, as far as that is known.
    """
    names = {int(known): known.name for known in signal.Signals}
    name = names.get(number, f"signal {number}")
    hint = ""
    if name == "SIGKILL":
        hint = {
            True: " (the system ends a process so when memory runs out, and has done so here)",
            None: " (the system ends a process so when memory runs out)",
            False: " (by another process, not for want of memory)",
        }[starved]
    elif name == "SIGABRT":
        hint = " (NCCL ends a process so when another rank is gone or late: look at the others first)"
    return f"was ended by {name}{hint}", name == "SIGABRT"


def starved_processes() -> int | None:
    """How many processes the system has ended for want of memory: of this group of processes, or else of the machine.

    None: it does not say.
    """
    group = _own_group()
    for file in (group / "memory.events", group / "memory.oom_control", COUNTED):
        with suppress(OSError, ValueError):
            lines = (line.split() for line in file.read_text().splitlines())
            for words in lines:
                if len(words) == 2 and words[0] == "oom_kill":
                    return int(words[1])
    return None


def _own_group() -> Path:
    """Where the system accounts for this process's memory: cgroups of version 2, or of version 1."""
    root, found = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup")
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, kinds, path = line.strip().split(":", 2)
            if "memory" in kinds.split(","):
                return root / "memory" / path.lstrip("/")
            if number == "0":
                found = root / path.lstrip("/")
    return found
