"""A training job as a user asks for it: what to train, how to spread it, where to run it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from phalanx.cluster import Cluster
from phalanx.data.loader import seed_globally
from phalanx.data.order import Order
from phalanx.errors import WrongUse, closest
from phalanx.launch.environment import TIMEOUT
from phalanx.launch.local import Failure, Outcome, run_ranks
from phalanx.layout import Layout
from phalanx.parallel.blueprint import Blueprint
from phalanx.parallel.spread import check_model
from phalanx.precision import DTYPES
from phalanx.proofs import said
from phalanx.run import EventLog, Run, read_settings
from phalanx.settings import find_task, make_task, parse_assignments, plain_settings
from phalanx.task import Task
from phalanx.train.engine import Engine, length
from phalanx.train.loop import Summary, train
from phalanx.verdict import Verdict
from phalanx.watch.screen import Screen, sparkline


@dataclass(frozen=True)
class Job:
    """Everything resolved and checked, so far as it can be without building the model."""

    reference: str
    task: Task
    layout: Layout
    cluster: Cluster
    timeout: timedelta

    @classmethod
    def resolve(
        cls,
        *,
        task: str | None,
        layout: str | None,
        on: str | None,
        assignments: Sequence[str],
        steps: int | None,
        config: Path | None,
        device: str | None,
        timeout: float | None,
        exact: bool = False,
    ) -> Job:
        """From the command line's words, over those of a ``run.toml`` if one is given."""
        torch.set_num_threads(1)  # a task file may compute while it is imported, and no thread may survive into a fork
        saved = read_settings(config) if config else {}
        ran: Mapping[str, Any] = saved.get("run", {})
        known = ("task", "layout", "on", "device", "timeout")
        for table, names in (("table", [n for n in saved if n not in ("run", "settings")]), ("key", ran)):
            for name in names:
                if table == "table" or name not in known:
                    raise WrongUse(f"{config} has a {table} {name!r} that means nothing; {closest(name, known)}")
        if int(os.environ.get("WORLD_SIZE", 1)) > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
            raise WrongUse(
                "phalanx train starts its ranks itself, and torchrun would start one such job a process. Use --on "
                "local:N without torchrun, or phalanx.Engine in a program of your own with it."
            )
        reference = task or ran.get("task")
        if reference is None:
            raise WrongUse("there is no task to train. Name one: phalanx train gpt, or phalanx train file.py")
        kind = find_task(reference)
        values: dict[str, Any] = {**saved.get("settings", {}), **parse_assignments(assignments)}
        if steps is not None:
            values["steps"] = steps
        made = make_task(kind, values)
        chosen, ranks = _place(layout or (None if on else ran.get("layout")), on or (None if layout else ran.get("on")))
        if exact:
            before = Layout.parse(ran["layout"]).exact if "layout" in ran else 0
            chosen = replace(chosen, exact=chosen.exact or before).exactly(made.global_batch)
        chosen.check(made.global_batch, ranks)
        seconds = float(ran.get("timeout", TIMEOUT.total_seconds())) if timeout is None else timeout
        if seconds <= 0:
            raise WrongUse(f"--timeout {seconds:g} leaves no time to wait. Give seconds above 0.")
        return cls(
            reference, made, chosen, Cluster.here(ranks, device or ran.get("device")), timedelta(seconds=seconds)
        )

    def describe(self) -> str:
        """What would run, with the model described and the data opened."""
        model = Blueprint(self.task.model, self.task.seed).model
        anatomy = self.task.anatomy(model)
        check_model(self.layout, model, anatomy)
        seed_globally(self.task.seed, "data")
        order = Order(length(self.task.data(), "data", self.task), self.task.global_batch, self.task.seed)
        settings = ", ".join(f"{name}={value}" for name, value in plain_settings(self.task).items())
        lines = {
            "task": f"{self.reference} ({type(self.task).__name__})",
            "set": settings,
            "layout": f"{self.layout} on {self.cluster}",
            "model": f"{sum(p.numel() for p in model.parameters()):,} weights, {anatomy.describe()}",
            "data": f"{order.size:,} samples, {order.steps_per_epoch:,} steps an epoch",
            "micro": f"{self.layout.micro_batches(self.task.global_batch)} micro-batches a step",
            "dtypes": DTYPES[self.task.precision].table(),
        }
        told = [f"{name:>7}  {text}" for name, text in lines.items()]
        notes = self.layout.notes(self.cluster.device, self.layout.micro_batches(self.task.global_batch))
        return "\n".join([*told, *(f"   note  {note}" for note in notes)])

    def train(self, path: Path | None) -> Verdict:
        """Run it to the end."""
        run = Run.create(path, Path(self.reference.partition(":")[0]).stem)
        place = {
            "task": _absolute(self.reference),
            "layout": str(self.layout),
            "on": f"local:{self.cluster.world}",
            "device": self.cluster.device,
            "timeout": self.timeout.total_seconds(),
        }
        print(f"  proof  {said(self.task, plain_settings(self.task), self.layout, run.path.parent, self.reference)}")
        run.write_settings({"run": place, "settings": plain_settings(self.task)})
        outcome = run_ranks(partial(self._rank, run), self.cluster.world)
        return self._verdict(run, outcome)

    def _rank(self, run: Run) -> Summary:
        """What each rank does."""
        with Engine(self.task, self.layout, device=self.cluster.device, timeout=self.timeout) as engine:
            if engine.environment.rank:
                return train(engine, run)
            screen = Screen(engine)
            screen.start()
            return train(engine, run, screen.step, screen.evaluation)

    def _verdict(self, run: Run, outcome: Outcome) -> Verdict:
        if outcome.interrupted:
            return Verdict(False, "stopped: every rank has ended", [f"what it did is in {run.path}"], code=130)
        if outcome.failures:
            return self._failed(run, outcome.failures)
        summary: Summary | None = outcome.result
        if summary is None:
            return Verdict(False, "a rank left before the end, by sys.exit perhaps", next="Take that out of the task.")
        evidence = []
        if summary.losses:
            evidence.append(f"loss {summary.losses[0]:.4f} {sparkline(summary.losses)} {summary.losses[-1]:.4f}")
        if summary.held_out:
            evidence.append("held out: " + ", ".join(f"{name} {value:.4f}" for name, value in summary.held_out.items()))
        if summary.skipped:
            evidence.append(f"{summary.skipped} steps were skipped: their gradient was not finite, or nothing counted")
        evidence.append(f"weights: {run.weights_path}")
        if summary.losses and summary.skipped == len(summary.losses):
            return Verdict(
                False, f"{type(self.task).__name__} learned nothing: every step was skipped", evidence,
                next="Look at the first step's loss: is a target out of range, a log of 0, an input not finite?",
            )  # fmt: skip
        return Verdict(True, f"trained {type(self.task).__name__} for {summary.steps} steps on {self.layout}", evidence)

    def _failed(self, run: Run, failures: list[Failure]) -> Verdict:
        first, *others = failures
        if first.code != 1:
            if not any(event["kind"] == "step" for event in run.events(0)):
                shutil.rmtree(run.path)  # it did nothing, and its name should be free for the next try
            return Verdict(False, f"phalanx: {first.reason}", code=first.code)
        for failure in failures:
            if failure.by_signal:
                with EventLog(run, failure.rank) as log:
                    log.write("failure", reason=failure.reason)
        evidence = [first.trace.rstrip()] if first.trace else []
        evidence += [f"rank {failure.rank}: {failure.reason}" for failure in others]
        return Verdict(
            False,
            f"rank {first.rank} failed first: {first.reason}",
            evidence,
            next=f"The job has ended and no rank is left. Mend the cause and start again; what it did is in {run.path}",
        )


def _absolute(reference: str) -> str:
    """A task file by its full path, so that the run can be repeated from anywhere; a recipe by its name."""
    file, colon, name = reference.partition(":")
    return f"{Path(file).resolve()}{colon}{name}" if file.endswith(".py") else reference


def _place(layout: str | None, on: str | None) -> tuple[Layout, int]:
    """The layout and the number of ranks, each from the other where only one is given."""
    ranks = None if on is None else _ranks(on)
    if layout is None:
        return Layout(dp=ranks or 1), ranks or 1
    parsed = Layout.parse(layout)
    return parsed, parsed.world if ranks is None else ranks


def _ranks(on: str) -> int:
    place, _, number = on.partition(":")
    if place != "local":
        raise WrongUse(f"--on {on}: {place!r} is not a place that is known. Use local:N, e.g. local:2.")
    if not number.isdigit() or int(number) < 1:
        raise WrongUse(f"--on {on} does not say how many ranks. Write it like local:2.")
    return int(number)
