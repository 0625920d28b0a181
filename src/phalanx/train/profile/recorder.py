"""Some steps of a rank under torch's profiler, left as a trace in the run's folder."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from phalanx.callbacks import Callback
from phalanx.events import say
from phalanx.files import make_folders, opened
from phalanx.run import Run
from phalanx.train.profile.host_clocks import ahead_ns
from phalanx.train.profile.ranges import Ranges
from phalanx.train.profile.request import ProfileRequest
from phalanx.watch.trace import MARK, part_path

if TYPE_CHECKING:
    from phalanx.train.engine import Engine
    from phalanx.train.step import Metrics

MARKS = 5
"""Ranges that are timed by this process too, so that the trace's clock is known."""

MANY_STEPS = 10
LEVEL = "KINETO_LOG_LEVEL"


@dataclass(eq=False)
class StepRecorder(Callback):
    """On every rank; those that are not chosen only help to compare the clocks of hosts."""

    request: ProfileRequest
    run: Run
    host: str
    """Its name."""
    generation: int
    may_take_long: Callable[[], None]
    """Called before what is no step."""
    said: Callable[[str], None]
    """Told how it goes, on rank 0."""
    _profile: profile | None = field(default=None, init=False)
    _ranges: Ranges | None = field(default=None, init=False)
    _over: bool = field(default=False, init=False)

    def on_start(self, engine: Engine) -> None:
        """From the first step on, if it is that one, or if the run goes on in the middle of them."""
        self._consider(engine)

    def on_step(self, engine: Engine, metrics: Metrics) -> None:
        """The next step may be the first to be recorded, or this one was the last."""
        if self._ranges is not None:
            self._ranges.end_step()
            if engine.step_number >= self.request.last:
                self.finish(engine)
        self._consider(engine)

    def _consider(self, engine: Engine) -> None:
        """Begin with the next step's first phase, after whatever is done between two steps."""
        if self._over or not self.request.first - 1 <= engine.step_number < self.request.last:
            return
        self._over = True

        def phase(name: str) -> None:
            engine.clock.watchers.remove(phase)
            self._begin(engine)
            if self._ranges is not None:
                self._ranges.begin(name)

        engine.clock.watchers.append(phase)

    def _begin(self, engine: Engine) -> None:
        self.may_take_long()
        steps = self.request.last - engine.step_number
        if steps > MANY_STEPS:
            self.said(f"   note  a trace of {steps} steps is large, and slow to write and to open")
        ahead = ahead_ns(engine)
        chosen = self.request.chosen(engine.environment.hosts)
        if engine.rank not in chosen:
            return
        self._began, self._marks = engine.step_number + 1, list[tuple[int, int]]()
        self._sent, self._calls = engine.traffic.sent.copy(), engine.traffic.calls.copy()
        self._facts: dict[str, Any] = {
            "rank": engine.rank, "world": engine.world, "host": self.host, "device": str(engine.device),
            "layout": str(engine.layout), "generation": self.generation, "chosen": chosen, "ahead_ns": ahead,
        }  # fmt: skip
        activities = [ProfilerActivity.CPU]
        if engine.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        found = profile(activities=activities)
        try:
            with _quiet():
                found.start()
        except RuntimeError as error:  # the task may have one of its own under way
            say(f"   note  rank {engine.rank} is not profiled: {str(error).splitlines()[0]}")
            return
        self._profile = found
        for _ in range(MARKS):
            before = time.time_ns()
            with record_function(MARK):
                pass
            self._marks.append((before, time.time_ns()))
        self._ranges = Ranges(engine).__enter__()

    def finish(self, engine: Engine) -> None:
        """The last of them is done, or of the run: what was recorded is written."""
        if self._profile is None or self._ranges is None:
            return
        found, ranges = self._profile, self._ranges
        self._profile = self._ranges = None
        ranges.__exit__()
        self.may_take_long()
        if engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)  # for what the last step launched to be in it
        sent, calls = engine.traffic.sent - self._sent, engine.traffic.calls - self._calls
        facts = self._facts | {
            "steps": [self._began, engine.step_number], "marks": self._marks,
            "sent": [[axis, kind, count] for (axis, kind), count in sent.items()],
            "calls": [[axis, kind, count] for (axis, kind), count in calls.items()],
        }  # fmt: skip
        path = part_path(self.run.path, self.request.name, engine.rank)
        unfinished = path.with_name(f"unfinished-{path.name}")
        try:
            make_folders(path.parent)
            found.add_metadata_json("phalanx", json.dumps(facts))
            found.stop()
            opened(unfinished, "wb").close()  # with its mode, which the export leaves
            found.export_chrome_trace(str(unfinished))
            unfinished.replace(path)
        except (OSError, RuntimeError) as error:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            say(f"   note  rank {engine.rank}: its trace cannot be written: {error}; going on without")
            return
        whole = path.parent.with_name(f"{self.request.name}.json.gz")
        self.said(f"profile  {self.request.told} recorded; all ranks' in one at the end of the run: {whole}")

    def stop(self) -> None:
        """Without a trace: something has failed."""
        if self._profile is not None:
            with suppress(Exception):
                self._profile.stop()
        if self._ranges is not None:
            self._ranges.__exit__()
        self._profile = self._ranges = None


@contextmanager
def _quiet() -> Iterator[None]:
    """The profiler notes on stderr that it begins and ends, unless it is told not to when it is first used."""
    given = os.environ.get(LEVEL)
    os.environ[LEVEL] = given or "99"
    try:
        yield
    finally:
        if given is None:
            del os.environ[LEVEL]
