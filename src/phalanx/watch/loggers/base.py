"""The base of all loggers: a callback that gives the first rank's numbers to one place, each step once.

A run may go back: to its last state after a failure, or by ``--resume``. Steps after that come again. A logger that can
forget them does so when it begins, and gets them anew. Another is not given them a second time; and what it lacks, for
it had not sent it yet when its rank was killed, it gets from the run's events.
"""

from __future__ import annotations

import importlib.util
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from phalanx import streams
from phalanx.callbacks import Callback
from phalanx.errors import CannotHere, WrongUse
from phalanx.events import say
from phalanx.files import make_folders, restricted, write_whole
from phalanx.run import Run
from phalanx.settings import plain_settings
from phalanx.watch.screen import memory_bytes

if TYPE_CHECKING:
    from phalanx.train.engine import Engine
    from phalanx.train.step import Metrics

Numbers = Mapping[str, float]


@dataclass(frozen=True)
class LoggedRun:
    """What a logger is told when it begins."""

    name: str
    folder: Path
    """For what it writes."""
    settings: dict[str, Any]
    """The task's, and how it is spread: text, numbers, truths."""
    step: int
    """After which it begins: 0, or where the run goes on."""


class Logger(Callback):
    """Give `begin`, `write`, `write_measures` and `end`. All of it is called on the first rank alone."""

    title: ClassVar[str]
    package: ClassVar[str] = ""
    """What must be importable, and pip's name for it if that is another."""
    installs: ClassVar[str] = ""
    file: ClassVar[str] = ""
    """What it writes, in its folder."""
    forgets: ClassVar[bool] = False
    """Whether it can forget steps that come again."""

    def __init__(self, folder: str | Path | None = None) -> None:
        """``folder``: where to write, in a folder with the run's name; by default ``logs`` in the run's own."""
        self.folder = None if folder is None else Path(folder)
        self._begun, self._finished, self._clock = False, False, 0.0
        self._last = 0
        """Up to which step there is nothing to write any more."""
        self._measured = 0
        if self.package and importlib.util.find_spec(self.package) is None:
            raise WrongUse(
                f"{self.title} needs a package that is not there. pip install {self.installs or self.package}"
            )

    @abstractmethod
    def begin(self, run: LoggedRun) -> None:
        """Open the log, or go on with it."""

    def had(self) -> int:
        """Up to which step it has them all, once it has begun; asked of one that cannot forget."""
        return 0

    @abstractmethod
    def write(self, step: int, numbers: Numbers) -> None:
        """A step's numbers; steps count from 1."""

    @abstractmethod
    def write_measures(self, step: int, measures: Numbers) -> None:
        """Those of held-out data, after a step."""

    @abstractmethod
    def end(self, finished: bool) -> None:
        """Close the log: the run is ``finished``, or stopped or failed and may go on."""

    def where(self, run: Run) -> str:
        """For people: where to look."""
        return str(self._folder(run) / self.file)

    def _folder(self, run: Run | None) -> Path:
        if self.folder is not None:
            return self.folder if run is None else self.folder / run.path.resolve().name
        if run is None:
            raise WrongUse(f"{self.title} has no run's folder to write to. Give one: {type(self).__name__}(folder=...)")
        return run.path / "logs"

    # As a callback

    def on_start(self, engine: Engine) -> None:
        """Begin, with what is known of earlier attempts."""
        if not engine.is_main:
            return
        folder, run = self._folder(engine.run), engine.run
        try:
            make_folders(folder)
            self._check_own(folder, run)
            self._last, self._measured = engine.step_number, 0
            name = folder.name if run is None else run.path.resolve().name
            with restricted():
                self.begin(LoggedRun(name, folder, hyperparameters(engine), engine.step_number))
            if run is not None and not self.forgets:
                self._catch_up(engine, run, self.had())
        except (WrongUse, CannotHere):
            raise
        except OSError as error:
            raise CannotHere(f"{self.title} cannot write to {folder}: {error}. Mend that, or leave it out.") from None
        self._begun, self._clock = True, time.perf_counter()

    def _check_own(self, folder: Path, run: Run | None) -> None:
        """Refuse a folder that has another run's logs, which would be forgotten."""
        if self.folder is None or run is None:
            return
        own = str(run.path.resolve())
        if (other := kept(folder / "run-folder", lambda: own)) != own:
            raise WrongUse(
                f"{folder} has the logs of {other}. Give {self.title} another folder, or remove that one if its logs "
                "are of no use any more."
            )

    def _catch_up(self, engine: Engine, run: Run, had: int) -> None:
        """What it lacks of the steps before this one, from the run's events."""
        self._last = max(had, self._last)
        measures = {event["step"] + 1: event["held_out"] for event in run.events(0, "evaluation")}
        before = 0.0
        for event in run.ledger().values() if had < engine.step_number else ():
            step, seconds, before = event["step"] + 1, event["time"] - before, event["time"]
            if event["kind"] == "step" and had < step <= engine.step_number:
                self.write(step, step_numbers(engine.task.counts, event, seconds if had + 1 < step else math.nan))
                if step in measures:
                    self.write_measures(step, {name: float(value) for name, value in measures[step].items()})
        self._measured = max((step for step in measures if step <= self._last), default=0)

    def on_step(self, engine: Engine, metrics: Metrics) -> None:
        """Write it, unless an earlier attempt has."""
        if not self._begun:
            return
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        if metrics.step >= self._last:
            self._last = metrics.step + 1
            numbers = step_numbers(engine.task.counts, vars(metrics), seconds)
            self._or_leave(self.write, metrics.step + 1, numbers | {"memory_gib": memory_bytes(engine.device) / 2**30})

    def on_evaluation(self, engine: Engine, measures: Numbers) -> None:
        """Write them, unless they are known: after a resume an evaluation may be made again."""
        if self._begun and (engine.step_number > self._measured or self.forgets):
            self._measured = engine.step_number
            self._or_leave(self.write_measures, engine.step_number, measures)

    def on_end(self, engine: Engine) -> None:
        """What is closed next is finished."""
        self._finished = True

    def close(self) -> None:
        """End, if it has begun."""
        if self._begun:
            self._begun = False
            self._or_leave(self.end, self._finished)

    def _or_leave(self, do: Callable[..., None], *given: Any) -> None:
        """Training goes on where a log cannot be written, and that is said once."""
        try:
            do(*given)
        except Exception as error:
            if self._begun:
                self._begun = False
                with suppress(Exception):  # what it has open, and runs, is let go
                    self.end(False)
            told = f"{type(error).__name__}: {error}".splitlines()[0]
            say(f"   note  {self.title} cannot be written to any more ({told}); going on without", streams.stderr())


def kept(path: Path, made: Callable[[], str]) -> str:
    """By which a run is known elsewhere: what a file of its folder says, or what is made now and written there."""
    if path.exists():
        return path.read_text(encoding="utf-8").strip()
    found = made()
    write_whole(path, found + "\n")
    return found


def step_numbers(counts: str, step: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """What is told of a step, from its metrics or its event. Of what each rank has for itself, the first rank's.

    ``counts``: what its loss counts; ``seconds``: since the step before.
    """
    speed = {"samples_per_second": step["slots"] / seconds} if seconds > 0 else {}
    if speed and counts == "tokens":
        speed["tokens_per_second"] = step["count"] / seconds
    turn = step.get("turn")
    found = {
        f"loss/{turn}" if turn else "loss": step["loss"],
        **{f"loss/{name}": value for name, value in step["losses"].items()},
        **step.get("logged", {}),
        **{name: step[name] for name in ("grad_norm", "clip_factor", "lr", "skipped")},
        **speed,
        **{f"seconds/{phase}": value for phase, value in step["seconds"].items()},
    }
    return {name: float(value) for name, value in found.items()}


def hyperparameters(engine: Engine) -> dict[str, Any]:
    """The task's settings and how it is spread, flat: text, numbers, truths; no secret."""
    found: dict[str, Any] = {"task": type(engine.task).__name__}
    _flatten(found, "", plain_settings(engine.task))
    return found | {"layout": str(engine.layout), "ranks": engine.world, "device": engine.device.type}


def _flatten(found: dict[str, Any], prefix: str, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, Mapping):
            _flatten(found, f"{prefix}{name}.", value)
        else:
            found[f"{prefix}{name}"] = value if isinstance(value, (bool, int, float, str)) else str(value)


def family(name: str) -> tuple[str, dict[str, str]]:
    """For places whose series have labels: which series a step's number belongs to, and its labels there."""
    first, slash, rest = name.partition("/")
    if slash and first in ("loss", "seconds"):
        return ("loss_part", {"name": rest}) if first == "loss" else ("seconds", {"phase": rest})
    return (name, {}) if name in PLAIN else ("logged", {"name": name})


PLAIN = {
    "loss": "of the last step, per term",
    "grad_norm": "of the mean gradient, before clipping",
    "clip_factor": "what the gradient was multiplied by",
    "lr": "learning rate",
    "skipped": "1 if the last step changed nothing",
    "samples_per_second": "over all ranks",
    "tokens_per_second": "over all ranks",
    "memory_gib": "the most that the first rank has held",
}
"""A step's own numbers that have no labels, and what they are."""
LABELLED = {
    "loss_part": "losses that the loss is the sum of, or those of turns, by name",
    "seconds": "of the last step on the first rank, by phase",
    "logged": "what the task logs, by name",
    "held_out": "measures of the last evaluation",
}
