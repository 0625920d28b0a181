"""The check of a task on one device, before ranks train: what is certainly wrong is refused, what is likely is said."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from phalanx.data.adopted import held_out_samples, own_collate, training_samples
from phalanx.data.planned import training_order
from phalanx.errors import WrongUse
from phalanx.task import Task
from phalanx.train.check import lines
from phalanx.train.check.leak import check_leak
from phalanx.train.check.learning import check_learning
from phalanx.train.check.names import check_names
from phalanx.train.check.samples import check_counts, count, read_sample, read_samples
from phalanx.train.check.subject import CannotCheck, Fails, RefusedAnyway, Subject, first_ids, raising, read
from phalanx.train.check.sums import check_evaluate, check_sums
from phalanx.train.check.updating import check_callbacks, check_optimizer, check_schedule
from phalanx.train.small_batches import instead, last_step

SLOW_SECONDS = 0.7
"""A batch that takes longer, forward and backward twice, is not computed in float64 as well."""
MOST_TOGETHER = 256
"""A global batch that is larger is not tried as a whole."""
RANGE = ("out of bounds", "out of range")


def check(task: Task, *, pretrained: bool = False) -> list[str]:
    """Refuse a task that would not train as it seems to; returns what is only likely to be a mistake, a line each.

    On one device, with a few samples, in about a second. ``pretrained``: its weights will be others than those that its
    model begins with. What the task's own code raises is raised.
    """
    warnings: list[str] = []
    try:
        look(task, pretrained, warnings)
    except Fails as failure:
        raise failure.error from None
    return warnings


def look(task: Task, pretrained: bool, warnings: list[str]) -> None:
    """Likewise, with the warnings that were found before anything was raised."""
    if not isinstance(task, Task):
        raise WrongUse(f"{task!r} is no task. Give an instance of a phalanx.Task, e.g. MyTask().")
    task.check()
    threads = torch.get_num_threads()
    generators = torch.random.get_rng_state(), np.random.get_state(), random.getstate()
    torch.set_num_threads(1)
    try:
        _Check(task, pretrained, warnings).run()
    finally:
        torch.set_num_threads(threads)
        torch.random.set_rng_state(generators[0])
        np.random.set_state(generators[1])
        random.setstate(generators[2])


def why_not_repeated(task: Task) -> str:
    """For a task that is known not to do the same twice: what the check says of it; empty where it sees nothing."""
    return _why(task, lambda subject: check_learning(subject, pretrained=True))


def why_not_a_sum(task: Task) -> str:
    """Likewise for one of which it is known to matter which samples are together."""

    def look(subject: Subject) -> None:
        subject.rest_batch_norms()
        subject.widen()
        check_sums(subject)

    return _why(task, look)


def _why(task: Task, look: Callable[[Subject], object]) -> str:
    try:
        subject = _subject(task)
        for _ in subject.in_turn():
            look(subject)
    except WrongUse as refusal:
        return str(refusal)
    except Exception:
        return ""  # something else is wrong with it, or it cannot be looked at
    return ""


def _subject(task: Task) -> Subject:
    data = training_samples(task)
    subject = Subject(task, [read(task, data, index) for index in first_ids(task, data)])
    subject.collate = own_collate(data)
    return subject


class _Check:
    def __init__(self, task: Task, pretrained: bool, warnings: list[str]) -> None:
        self.task, self.warnings = task, warnings
        with raising(f"{type(task).__name__}.pretrained()"):
            self.pretrained = pretrained or task.pretrained() is not None
        with raising(f"{type(task).__name__}.data()"):
            self.data = training_samples(task)

    def run(self) -> None:
        task = self.task
        self.warnings += [*check_names(task), *check_schedule(task)]
        check_callbacks(task)
        samples, found = read_samples(task, self.data)
        self.warnings += found
        self._compute(samples)
        with raising(f"{type(task).__name__}.held_out()"):
            held_out = held_out_samples(task)
        if held_out is not None:
            count(task, held_out, "held_out")
        self._evaluate(held_out)
        self.warnings += check_leak(task, self.data, held_out)

    def _compute(self, samples: list[Any]) -> None:
        self.subject: Subject | None = None
        try:
            subject = Subject(self.task, samples)
        except CannotCheck as reason:
            self.warnings.append(f"{reason}.")
            return
        subject.collate = own_collate(self.data)
        began = time.process_time()
        try:
            self._learns(subject)
        except (Fails, WrongUse) as failure:
            if not subject.changed:
                self._check_size(failure, len(subject.samples))
                raise
            if type(self.task).tiny is Task.tiny:
                if isinstance(failure, WrongUse):
                    raise
                raise CannotCheck(f"made smaller, {failure}") from failure  # by a rule that need not fit it
            subject = _subject(self.task.tiny())  # its sizes are other than those of these samples
            self._learns(subject)
        self._check_last(subject)
        self.warnings += check_optimizer(subject)
        self.slow = time.process_time() - began > SLOW_SECONDS
        subject.rest_batch_norms()
        if not self.slow:
            subject.widen()
        for _ in subject.in_turn():
            self.warnings += check_sums(subject)
        if not self.slow:
            check_counts(subject)
        self.subject = subject

    def _check_size(self, failure: Exception, tried: int) -> None:
        """Refuse a task that computes batches of one size alone: an epoch ends with a shorter one."""
        size = self.task.global_batch
        if not isinstance(failure, Fails) or failure.where == "backward" or not tried < size <= MOST_TOGETHER:
            return
        try:
            ids = training_order(self.task, self.data).ids(0)
            whole = Subject(self.task, [read(self.task, self.data, int(index)) for index in ids], all_samples=True)
            whole.collate = own_collate(self.data)
            whole.compute(whole.places)
        except Exception:
            return
        raise WrongUse(
            f"{failure}, with {tried} samples; with {size} it does not. The last batch of an epoch may be shorter, and "
            "layouts divide a batch. Take its size from what comes in: x.shape[0], len(x), or -1."
        ) from failure

    def _check_last(self, subject: Subject) -> None:
        """Refuse a task that cannot compute the last batch of an epoch, where that is smaller than what was tried."""
        order = training_order(self.task, self.data)
        slots = order.slots(order.steps_per_epoch - 1)
        if slots >= len(subject.samples) or self.task.steps < order.steps_per_epoch:
            return
        try:
            for _ in subject.in_turn():
                subject.compute(range(slots))
        except (Fails, WrongUse) as failure:
            told = f"{str(failure).rstrip('.')}. That is where {last_step(order, slots)}. {instead(order)}."
            raise RefusedAnyway(told) from failure

    def _learns(self, subject: Subject) -> None:
        try:
            for _ in subject.in_turn():
                self.warnings += check_learning(subject, self.pretrained)
        except Fails as failure:
            cut = subject.changed and not failure.where.startswith("the forward")  # targets may be places in a text
            if isinstance(failure.error, IndexError) and any(w in str(failure.error) for w in RANGE) and not cut:
                raise _out_of_range(subject, failure) from failure
            if "process group has not been initialized" in str(failure.error):
                raise WrongUse(
                    f"{failure.where} calls torch.distributed itself{lines.at(failure.line)}, and would mean something "
                    "else under every layout. phalanx.gather(x) gives the rows of the whole global batch, with their "
                    "gradients; totals and counts that loss and evaluate return are summed over ranks."
                ) from failure
            raise

    def _evaluate(self, held_out: Any) -> None:
        """What is measured on held-out data, of some of it."""
        if self.subject is None or self.slow or held_out is None or self.subject.task is not self.task:
            return
        some = range(min(len(self.subject.samples), len(held_out), self.task.global_batch))
        self.subject.take([read_sample(self.task, held_out, index, "held_out") for index in some])
        self.subject.collate = own_collate(held_out)
        if not self.subject.changed:
            self.warnings += check_evaluate(self.subject)


def _out_of_range(subject: Subject, failure: Fails) -> WrongUse:
    first, line = str(failure.error).splitlines()[0], failure.line or lines.of(type(subject.task).model)
    columns = {
        name: f"{int(column.min())} to {int(column.max())}"
        for name, column in subject.batch(subject.places).items()
        if isinstance(column, torch.Tensor) and not column.is_floating_point() and column.numel()
    }
    has = ", ".join(f"{name!r} has {values}" for name, values in columns.items())
    return WrongUse(
        f"{failure.where} has an id or a label that is out of range: {first}{lines.at(line)}; in the first "
        f"batch {has}. Labels go from 0 to one less than the classes; make the model larger, or number them so."
    )
