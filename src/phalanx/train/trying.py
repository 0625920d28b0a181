"""A task tried for a few steps on fresh ranks, without a run: nothing is saved, and callbacks only freeze weights."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.callbacks import Callback, Freeze
from phalanx.errors import CannotHere, WrongUse
from phalanx.launch.local import Failure, run_ranks
from phalanx.layout import Layout
from phalanx.run import Run
from phalanx.task import Task
from phalanx.train.engine import Engine
from phalanx.train.job import Job
from phalanx.train.profile.exhausted import is_exhausted
from phalanx.train.variant import Variant, variant
from phalanx.watch.screen import memory_bytes

Program = Callable[[Engine], Any]


class Tried(Variant):
    """Stands before a task's own class."""

    def callbacks(self) -> list[Callback]:
        """Those alone that say what is trained."""
        return [each for each in super().callbacks() if isinstance(each, Freeze)]


@dataclass(frozen=True)
class Attempt:
    """What became of one."""

    result: Any = None
    peak: int = 0
    """Bytes that the fullest rank held."""
    failure: Failure | None = None
    exhausted: bool = False
    """It failed in want of memory."""

    def or_refuse(self) -> Any:
        """What rank 0 gave; what failed is raised."""
        if self.failure is None:
            return self.result
        told = f"rank {self.failure.rank} {self.failure.reason}"
        if self.exhausted:
            raise CannotHere(f"{told}. Try phalanx tune batch, or a layout that shards.")
        raise (WrongUse if self.failure.code == 2 else CannotHere)(
            self.failure.reason if self.failure.final else f"{told}\n{self.failure.trace}".rstrip()
        )


def attempt(job: Job, program: Program, layout: Layout, known: Path | None = None, **settings: Any) -> Attempt:
    """Have ranks make an engine of the job's task with these settings, and run a program with it.

    ``known``: a folder for what the task wants to know of samples beforehand, which several attempts have in common.
    """
    task: Task = variant(job.task, Tried, epochs=0.0, **settings)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        outcome = run_ranks(partial(_on_rank, task, layout, job.cluster.device, folder, known, program), layout.world)
        if outcome.interrupted:
            raise KeyboardInterrupt
        peaks = [int(path.read_text()) for path in folder.glob("peak-*")]
        starved = any(folder.glob("exhausted-*"))
    failure = next(iter(outcome.failures or ()), None)
    killed = failure is not None and failure.by_signal and "SIGKILL" in failure.reason
    return Attempt(outcome.result, max(peaks, default=0), failure, starved or killed)


def _on_rank(task: Task, layout: Layout, device: str, folder: Path, known: Path | None, program: Program) -> Any:
    rank = os.environ.get("RANK", "0")
    try:
        run = None if known is None else Run(known)
        with Engine(task, layout, device=device, run=run) as engine:
            result = program(engine)
            (folder / f"peak-{rank}").write_text(str(memory_bytes(engine.device)))
            return result
    except Exception as error:
        if is_exhausted(error):
            (folder / f"exhausted-{rank}").touch()
        raise
