"""The pool of ranks that every test uses: forked once, over gloo, and reused from test to test."""

from __future__ import annotations

import datetime
import gc
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from phalanx.launch.pool import Pool
from tests.forking import server

TIMEOUT = datetime.timedelta(seconds=60)
SIZE = 8


class RankFailed(AssertionError):
    """A rank raised; carries its traceback."""


class Ranks(Pool):
    """``ranks(world, function, *args)`` runs a function on so many ranks and returns what each of them gave."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__(server(), size, TIMEOUT, after=_check_clean)

    def __call__(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        answers = self.ask(world, _noted, function, args)
        failed = [answer for answer in answers if answer.failed]
        if failed:
            raise RankFailed("\n".join(f"rank {a.rank}:\n{a.trace or 'died, or gave no answer'}" for a in failed))
        return [answer.value for answer in answers]


_before: tuple[int, dict[str, str]] = (0, {})
THREADS = 3
"""Of each process group of gloo's."""


def _noted(function: Callable[..., Any], args: Any) -> Any:
    """Run a function, having noted what there was before."""
    global _before
    _before = threading.active_count(), dict(os.environ)
    return function(*args)


def _gloo_threads() -> int:
    """Of process groups that are there, or that somebody still holds."""
    found = 0
    for task in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has ended
            found += "gloo" in task.read_text()
    return found


def _check_clean(world: int) -> None:
    threads, variables = _before
    gc.collect()
    groups = len(dist.distributed_c10d._world.pg_map)
    assert groups <= (world > 1), f"{groups - 1} process groups were left behind"
    deadline = time.monotonic() + 2
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)  # a queue's thread ends a moment after the queue
    assert threading.active_count() <= threads, f"threads were left behind: {threading.enumerate()}"
    allowed = THREADS * (groups + 1)  # torch itself may hold the world of the job before
    while _gloo_threads() > allowed and time.monotonic() < deadline:
        time.sleep(0.01)
    left = _gloo_threads() - allowed
    assert left <= 0, f"{left} threads of process groups were left behind: something holds what was made from them"
    assert dict(os.environ) == variables, "environment variables were changed"
