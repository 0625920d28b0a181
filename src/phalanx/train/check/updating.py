"""Whether a task's optimizer and schedule would train its model, and can be saved."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from phalanx.checkpoint.state import check_keepable, check_owners
from phalanx.errors import WrongUse
from phalanx.task import Task
from phalanx.train.check import lines
from phalanx.train.check.subject import Fails, Subject, raising
from phalanx.train.optimizers import make_optimizer

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
            with raising(f"{name}.optimizer()"):
                optimizer = make_optimizer(task, list(weights.values()), bool(weights), sharded=False)
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
        for weight in grouped:
            for key, value in optimizer.state.get(weight, {}).items():
                check_keepable(optimizer, weight.logical_name, weight, key, value)
    except WrongUse as refusal:
        raise WrongUse(f"{refusal} Or use another optimizer, such as torch.optim.AdamW{lines.at(where)}.") from refusal
    subject.model.zero_grad()
    found = []
    ids = {id(weight) for weight in grouped}
    left = [n for n, weight in weights.items() if id(weight) not in ids]
    if left:
        more = f" and {len(left) - SHOWN} more" if len(left) > SHOWN else ""
        found.append(
            f"{', '.join(left[:SHOWN])}{more} are trainable and in no group of {name}.optimizer{lines.at(where)}: they "
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


def check_schedule(task: Task) -> list[str]:
    """A schedule must be a function of the step that gives a factor, or one for each of several optimizers."""
    name = f"{type(task).__name__}.schedule"
    with lines.returns(type(task).schedule) as returned, raising(f"{name}()"):
        given = task.schedule()
    where = lines.at(returned())
    several = given if isinstance(given, Mapping) else {"": given}
    every = [_check_factor(task, f"{name}[{key!r}]" if key else name, factor, where) for key, factor in several.items()]
    return [warning for found in every for warning in found]


def _check_factor(task: Task, name: str, factor: Any, where: str) -> list[str]:
    how = "Return a function of the step that gives a factor on the learning rate, e.g. lambda step: 0.99**step."
    if isinstance(factor, LRScheduler) or not callable(factor):
        raise WrongUse(f"{name} returned a {type(factor).__name__}{where}, not a function of the step. {how}")
    steps = sorted({step * max(0, task.steps - 1) // LOOKED_AT for step in range(LOOKED_AT + 1)})
    with raising(f"{name}"):
        values = [factor(step) for step in steps]
        again = [factor(step) for step in steps]
    wrong = [v for v in values if not isinstance(v, (Real, torch.Tensor)) or not 0 <= float(v) < math.inf]
    if wrong:
        raise WrongUse(f"{name} gives {wrong[0]!r} as a factor on the learning rate{where}. {how}")
    if [float(v) for v in values] != [float(v) for v in again]:
        raise WrongUse(
            f"{name} gives another factor when it is asked again for the same step{where}: after a resume it would be "
            f"another run. {how}"
        )
    highest = max(map(float, values))
    if highest == 0 and task.steps:
        return [f"{name} is 0 at every step{where}: nothing will be learned. {how}"]
    if 0 < highest <= SMALL_FACTOR and task.steps > 1:
        return [
            f"{name} gives {highest:g} at most{where}, which is multiplied with the optimizer's learning rate: is it a "
            f"rate itself? {how}"
        ]
    return []
