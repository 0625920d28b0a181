"""A run evaluated: the weights of one of its checkpoints, under any layout, by its task's own measures."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from phalanx.checkpoint.frozen import leaves_out
from phalanx.checkpoint.manager import CheckpointManager
from phalanx.checkpoint.verify import manager_of
from phalanx.errors import REFUSALS, WrongUse
from phalanx.files import exists
from phalanx.folder_files import appending
from phalanx.launch.local import Failure, run_ranks
from phalanx.questions import ModelAnswer
from phalanx.redact import redact_words
from phalanx.run import Run
from phalanx.settings import make_task, over, parse_assignments
from phalanx.train.answering import answered, answers_path, write_answers
from phalanx.train.checkpoint_weights import load_weights
from phalanx.train.engine import Engine
from phalanx.train.job import Job
from phalanx.train.judging import Judge, judge_of, judged
from phalanx.train.options import Options
from phalanx.train.resolving import job_of
from phalanx.train.trusted import task_of

Data = Literal["held-out", "training"]
ANSWERS = 16


class EvaluationFailed(RuntimeError):
    """A rank of an evaluation ended badly."""


@dataclass(frozen=True)
class Evaluation:
    """What one checkpoint came to."""

    step: int
    measures: dict[str, float]
    answers: list[ModelAnswer] = field(default_factory=list)


@dataclass(frozen=True)
class Evaluator:
    """A run, and how its checkpoints are evaluated."""

    run: Run
    job: Job
    manager: CheckpointManager
    data: Data = "held-out"
    answers: int = ANSWERS
    """So many questions are answered, where the task has any."""
    judge: Judge | None = None

    @classmethod
    def of(
        cls, path: Path, *, assignments: Sequence[str] = (), layout: str | None = None, on: str | None = None,
        device: str | None = None, data: str = "held-out", answers: int | None = None, judge: str | None = None,
        checkpoints: str | None = None, trust: bool = False,
    ) -> Evaluator:  # fmt: skip
        """As a command line asks for it; what is not said is as the run was."""
        run = Run(path)
        if not exists(run.settings_path):
            raise WrongUse(f"{path} holds no run. Give the folder of one, such as runs/sft-001.")
        if data not in get_args(Data):
            raise WrongUse(f"--data {data} is not known. Choose one of: {', '.join(get_args(Data))}.")
        if answers is not None and answers < 0:
            raise WrongUse(f"--answers {answers} is no number of answers. Give 0 or more.")
        torch.set_num_threads(1)  # a task file may compute while it is imported, and no thread may survive into a fork
        saved = run.settings()
        ran: Mapping[str, Any] = saved["run"]
        if on is None and ran.get("max_nodes", 1) > 1:  # the ranks of all its hosts, here
            ran = {name: value for name, value in ran.items() if name != "on"}
        kind = task_of(run.settings_path, {**ran, "task": run.task()}, trust)
        task = make_task(kind, over(saved.get("settings", {}), parse_assignments(assignments)))
        scorer = None if judge is None else judge_of(judge)
        job = job_of(run.task(), task, layout, on, device, Options(), ran=ran)
        manager = manager_of(checkpoints or str(path), "Give that URL with --checkpoints.")
        return cls(run, job, manager, data, ANSWERS if answers is None else answers, scorer)  # type: ignore[arg-type]

    def chosen(self, step: int | None = None) -> int:
        """A checkpoint's step; by default the newest's."""
        steps = self.manager.steps()
        if not steps:
            raise WrongUse(f"there is no checkpoint in {self.manager.store.url}. Train first, or give another run.")
        if step is not None and step not in steps:
            known = ", ".join(map(str, steps))
            raise WrongUse(f"there is no checkpoint of step {step}. Choose --checkpoint from: {known}.")
        return max(steps) if step is None else step

    def evaluate(self, step: int) -> Evaluation:
        """Fork ranks, and have them evaluate a checkpoint."""
        self.job.cluster.check_room()
        self.job.task.prepare()
        outcome = run_ranks(partial(self._rank, step), self.job.cluster.world)
        if outcome.failures:
            raise _told(outcome.failures[0])
        found = outcome.result
        if not isinstance(found, Evaluation):
            raise KeyboardInterrupt
        if self.judge is not None and found.answers:
            found.measures["judge"] = judged(self.judge, found.answers)
        return found

    def _rank(self, step: int) -> Evaluation:
        """What each rank does."""
        job, options = self.job, self.job.options
        with Engine(
            job.task, job.layout, device=job.cluster.device, timeout=timedelta(seconds=options.timeout),
            init_from=self._init_from(), allow_changes=True, run=self.run,
            evaluates="data" if self.data == "training" else "held_out",
        ) as engine:  # fmt: skip
            take_up(engine, self.manager, step)
            if self.data == "training":
                engine.held_out = engine.in_order(engine.loader.reader.data, "data")  # with what is joined to it
            measures = engine.evaluate()
            if job.task.counts == "tokens" and "loss" in measures:
                measures["perplexity"] = math.exp(min(measures["loss"], 700.0))
            questions = job.task.questions() if self.answers else None
            if questions is None or not questions.every:
                if self.judge is not None:
                    raise WrongUse(f"--judge has nothing to judge: {type(job.task).__name__} has no answers here.")
                return Evaluation(step, measures)
            with engine.callbacks.evaluating(engine):
                answers = answered(engine, questions, self.answers)
        measures["exact_match"] = sum(each.exact for each in answers) / len(answers)
        return Evaluation(step, measures, answers)

    def _init_from(self) -> str | None:
        """The folder that the run began in, if anything of it is needed still."""
        found: str | None = self.run.settings()["run"].get("init_from")
        if found is None or leaves_out(self.manager):
            return found
        return found if self.job.task.beforehand() is not None and Path(found).exists() else None

    def note(self, found: Evaluation, assignments: Sequence[str] = ()) -> str:
        """Write what was found into the run's folder; where its answers are, if there are any."""
        event = {
            "kind": "evaluation", "time": time.time(), "step": found.step, "data": self.data,
            "settings": redact_words(assignments), "layout": str(self.job.layout),
            "held_out": found.measures,
        }  # fmt: skip
        with appending(self.run.path, self.run.path / "evaluations.jsonl") as file:
            file.write(f"{json.dumps(event)}\n".encode())
        return write_answers(answers_path(self.run, found.step, "evaluated-"), found.answers) if found.answers else ""


def take_up(engine: Engine, manager: CheckpointManager, step: int) -> None:
    """The weights of a checkpoint, and what callbacks keep beside them; nothing of the optimizer's."""
    facts = load_weights(engine, manager, step).facts
    engine.step_number = facts["step"]
    engine.callbacks.restore(facts.get("callbacks", {}))


def _told(failure: Failure) -> Exception:
    kind = REFUSALS.get(failure.code)
    return kind(failure.reason) if kind else EvaluationFailed(f"rank {failure.rank} {failure.reason}\n{failure.trace}")
