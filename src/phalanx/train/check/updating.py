"""Whether a task's optimizer and schedule would train its model, and can be saved."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable

import torch

from phalanx.checkpoint.keepable import check_keepable, check_owners
from phalanx.errors import WrongUse
from phalanx.task import Task
from phalanx.train.calling import made_callbacks
from phalanx.train.check import lines
from phalanx.train.check.subject import Fails, Subject, overrides, raising, unless_said
from phalanx.train.optimizers import SCHEDULE, check_factor, make_optimizer, make_schedule, schedules, wants_whole
from phalanx.words import listed

SHOWN = 3
LOOKED_AT = 64
SMALL_FACTOR = 0.02


def check_optimizer(subject: Subject) -> list[str]:
    """An update of the model, and what the optimizer keeps of it."""
    task, name = subject.task, subject.name
    weights = {n: w for n, w in subject.model.named_parameters() if w.requires_grad}
    with lines.returns(type(task).optimizer) as returned, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with raising(f"{name}.optimizer()", type(task).optimizer):
                optimizer = make_optimizer(task, list(weights.values()), bool(weights))
        except Fails as failure:
            if "more than one parameter group" not in str(failure.error):
                raise
            raise _twice(name, "", failure.line) from failure
    where = returned()
    grouped = [weight for group in optimizer.param_groups for weight in group["params"]]
    if len({id(weight) for weight in grouped}) < len(grouped):
        raise _twice(name, next(w.logical_name for w in grouped if sum(w is o for o in grouped) > 1), where)
    for weight in weights.values():
        weight.grad = torch.full_like(weight, 1e-3)
    with raising(f"the step of {type(optimizer).__name__}"):
        optimizer.step()
    try:
        check_owners(optimizer, grouped)
        whole = wants_whole(optimizer)
        for weight in grouped:
            for key, value in optimizer.state.get(weight, {}).items():
                check_keepable(optimizer, weight.logical_name, weight, key, value, weight.logical_name in whole)
    except WrongUse as refusal:
        raise WrongUse(f"{refusal} Or use another optimizer, such as torch.optim.AdamW{lines.at(where)}.") from refusal
    subject.model.zero_grad()
    found = []
    ids = {id(weight) for weight in grouped}
    left = [n for n, weight in weights.items() if id(weight) not in ids]
    if left:
        found.append(
            f"{listed(left, SHOWN)} are trainable and in no group of {name}.optimizer{lines.at(where)}: they "
            "will stay as they are. Put them into a group, or set requires_grad to False for them."
        )
    if all(group["initial_lr"] == 0 for group in optimizer.param_groups):
        found.append(f"the learning rate is 0 in every group{lines.at(where)}: nothing will be learned.")
    return found


def _twice(name: str, weight: str, line: str) -> WrongUse:
    what = f"{weight} twice" if weight else "some weights in more than one group"
    return WrongUse(
        f"{name}.optimizer has {what}, which would then be updated twice a step{lines.at(line)}. Put each weight into "
        "one group: a tied weight is given once already."
    )


def check_callbacks(task: Task) -> None:
    """A task's callbacks must be a list of them."""
    with lines.returns(type(task).callbacks) as returned:
        try:
            with raising(f"{type(task).__name__}.callbacks()", type(task).callbacks):
                made_callbacks(task)
        except WrongUse as refusal:
            raise type(refusal)(f"{refusal}{unless_said(returned(), str(refusal))}") from refusal


def check_schedule(task: Task) -> list[str]:
    """A schedule must give the same factor for the same step, and some rate at all."""
    with lines.returns(type(task).schedule) as returned:
        with raising(f"{type(task).__name__}.schedule()", type(task).schedule):
            several = schedules(task)
        where = lines.at(returned())
    found = []
    try:
        with raising(f"{type(task).__name__}.schedule"):
            make_schedule(task)
        for name, schedule in several.items():
            found += _check_factors(task, name, schedule, where)
    except WrongUse as refusal:
        raise type(refusal)(f"{refusal}{unless_said(returned(), str(refusal))}") from refusal
    return found


def _warms_up(task: Task) -> bool:
    """Whether somebody chose the warm-up for so many steps: the usual one is there for runs that are tried shortly."""
    usual = {field.name: field.default for field in dataclasses.fields(task)}
    tried = task.steps != usual["steps"] and task.warmup_steps == usual["warmup_steps"]
    return not tried and task.warmup_steps != Task.warmup_steps and not overrides(task, "schedule", Task)


def _asked(schedule: Callable[[int], float], name: str, step: int, where: str) -> float:
    try:
        return schedule(step)
    except Exception as error:
        line = lines.at(lines.of_error(error)) or where
        raise WrongUse(
            f"{name} fails for step {step + 1}: {type(error).__name__}: {error}{line}. It must give a factor for every "
            "step of the run."
        ) from error


def _check_factors(task: Task, name: str, schedule: Callable[[int], float], where: str) -> list[str]:
    steps = sorted({step * max(0, task.steps - 1) // LOOKED_AT for step in range(LOOKED_AT + 1)})
    values, again = ([_asked(schedule, name, step, where) for step in steps] for _ in range(2))
    for step, value in zip(steps, values, strict=True):
        check_factor(value, name, step)
    if values != again:
        raise WrongUse(
            f"{name} gives another factor when it is asked again for the same step: after a resume it would be "
            f"another run. {SCHEDULE} alone: return lambda step: 0.99**step"
        )
    highest = max(values)
    if highest == 0 and task.steps:
        return [f"{name} is 0 at every step{where}: nothing will be learned."]
    if 0 < highest < 1 and task.warmup_steps >= task.steps > 1 and _warms_up(task):
        return [
            f"warmup_steps={task.warmup_steps} of {task.steps} steps: the learning rate gets no further than "
            f"{highest:g} of what it is set to. Set fewer."
        ]
    if 0 < highest <= SMALL_FACTOR and task.steps > 1:
        return [
            f"{name} gives {highest:g} at most{where}, which is multiplied with the optimizer's learning rate: is it a "
            f"rate itself? {SCHEDULE}: return lambda step: 0.99**step"
        ]
    return []
