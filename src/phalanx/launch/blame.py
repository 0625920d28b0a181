"""What the end of a rank says of itself and of others: one line, and whether it only lost sight of those."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from phalanx.errors import CannotHere, WrongUse
from phalanx.traces import Traced

LOST, WAITED = "lost its connection", "waited for another rank"
SPOILT = "cannot compute, since the task's file does when it is imported"
IN_A_FORK = ("fork-based multiprocessing", "re-initialize CUDA in forked")
"""Words of torch, where a process was forked from one that had computed."""
TIMED_OUT = ("imed out", "timing out", "operation timeout", "wait timeout")
"""Words of gloo, of NCCL's watchdog and of a store."""
GONE = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection was likely closed",
    "ncclRemoteError", "remote process exit", "communicator was aborted", "ncclCommAbort",
)  # fmt: skip
"""Words of gloo, of NCCL and of a store, where another rank or its process is not there any more."""


COUNTED = Path("/proc/vmstat")
"""Where Linux counts, for the whole machine, what it does about memory."""


def reason(error: Exception) -> str:
    """One line on an error."""
    text = str(error)
    first = text.splitlines()[0] if text else ""
    if isinstance(error, (WrongUse, CannotHere)):
        return text
    if any(words in text for words in IN_A_FORK):
        return f"{SPOILT} ({first[:80]}). Move that into model() or data(), or under a main guard"
    if isinstance(error, RuntimeError) and any(words in text for words in TIMED_OUT):  # also where NCCL then aborted
        return f"{WAITED} until its time was up ({first[:80]}); look at the others first"
    if isinstance(error, dist.DistNetworkError) or (
        isinstance(error, RuntimeError) and any(words in text for words in GONE)
    ):
        return f"{LOST} to a rank that ended"
    if isinstance(error, Traced):
        return first
    return f"{type(error).__name__}: {first}" if text else type(error).__name__


def secondary(said: str) -> bool:
    """Whether something happened to another rank, by what one says."""
    return said.startswith((LOST, WAITED))


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
    """How many processes the system has ended here for want of memory; None: it does not say."""
    found: list[int] = []
    for file in (COUNTED, _own_group() / "memory.events"):
        with suppress(OSError, ValueError):
            lines = (line.split() for line in file.read_text().splitlines())
            found += [int(words[1]) for words in lines if len(words) == 2 and words[0] == "oom_kill"]
    return sum(found) if found else None


def _own_group() -> Path:
    """Where the system accounts for this process's memory (cgroups, version 2)."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return Path("/sys/fs/cgroup") / line[3:].strip().lstrip("/")
    return Path("/sys/fs/cgroup")
