"""What the end of a rank says of itself and of others: one line, and whether it only lost sight of those."""

from __future__ import annotations

import signal

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


def ended_by(number: int) -> tuple[str, bool]:
    """One line on a signal, and whether another rank may be its cause: NCCL's watchdog aborts when it misses one."""
    names = {int(known): known.name for known in signal.Signals}
    name = names.get(number, f"signal {number}")
    hint = ""
    if name == "SIGKILL":
        hint = " (the system ends a process so when memory runs out)"
    elif name == "SIGABRT":
        hint = " (NCCL ends a process so when another rank is gone or late: look at the others first)"
    return f"was ended by {name}{hint}", name == "SIGABRT"
