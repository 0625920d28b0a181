"""Processes that do not outlive the one that started them, and one to look at something in."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

T = TypeVar("T")

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """End this process when its parent ends, however the parent ends."""
    started_by = multiprocessing.parent_process()
    parent = started_by.pid if started_by and started_by.pid else os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def aside(function: Callable[[], T]) -> T:
    """What a function gives in a process of its own: nothing that it opens, draws or changes is left in this one."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_give, args=(function, theirs))
    process.start()
    theirs.close()
    try:
        value, error = pickle.loads(ours.recv_bytes())
    except EOFError:
        process.join()
        raise RuntimeError(f"a process that was to look at something ended with {process.exitcode}") from None
    finally:
        ours.close()
    process.join()
    if error is not None:
        raise error
    return value


def _give(function: Callable[[], Any], pipe: Connection) -> None:
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        told = pickle.dumps((function(), None))
    except Exception as error:
        try:
            told = pickle.dumps((None, error))
        except Exception:
            told = pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))
    pipe.send_bytes(told)
    os._exit(0)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
