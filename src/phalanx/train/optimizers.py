"""Which optimizers may update a piece of a weight alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn, optim

from phalanx.errors import WrongUse
from phalanx.task import Task
from phalanx.traces import described

ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adagrad, optim.Adadelta, optim.Adamax,
    optim.RMSprop, optim.Rprop, optim.ASGD,
)  # fmt: skip
"""Each element's update depends on that element alone, so rows can be updated where they live."""


def make_optimizer(task: Task, pieces: Sequence[nn.Parameter], trained: bool, sharded: bool) -> optim.Optimizer:
    """The task's optimizer over this rank's pieces, refused where it would not give what one device gives.

    ``trained`` says whether any rank has one: a stage of a pipeline may be all frozen.
    """
    name = type(task).__name__
    if not trained:
        raise WrongUse(f"the model of {name} has no trainable weight. Check requires_grad.")
    if not pieces:
        nothing = nn.Parameter(torch.zeros(1, 1))
        nothing.logical_name = "nothing"  # type: ignore[attr-defined]
        pieces = [nothing]
    optimizer = task.optimizer(pieces)
    if not isinstance(optimizer, optim.Optimizer):
        raise WrongUse(f"{name}.optimizer returned {_no_optimizer(optimizer)}")
    known = {id(piece) for piece in pieces}
    strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if strangers:
        raise WrongUse(
            f"{name}.optimizer updates {len(strangers)} tensors that are not those it was given, so the model would "
            f"learn nothing from it (the first has the shape {tuple(strangers[0].shape)}). Make it from the parameters "
            "that it is called with, not from a model of its own."
        )
    kind = type(optimizer)
    if isinstance(optimizer, optim.LBFGS):
        raise WrongUse("LBFGS evaluates the loss many times in a step. Use an optimizer with one gradient a step.")
    if sharded and not (isinstance(optimizer, ELEMENTWISE) or getattr(kind, "elementwise", False)):
        raise WrongUse(
            f"{kind.__name__} is not known to update each element by itself, and under fsdp a rank holds some rows "
            f"of a weight. Use dp instead of fsdp, or, if it does, say so: {kind.__name__}.elementwise = True."
        )
    for group in optimizer.param_groups:
        group["initial_lr"] = float(group["lr"])
    return optimizer


def _no_optimizer(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}. Return one made from the parameters: {value.__name__}(params, lr=...)."
    if isinstance(value, (tuple, list, dict)):
        return (
            f"a {type(value).__name__}. Return one torch.optim.Optimizer; several rates are its parameter groups, and "
            "a schedule is the task's schedule(), a function of the step."
        )
    return f"a {type(value).__name__}. Return a torch.optim.Optimizer."


def make_schedule(task: Task) -> Callable[[int], float]:
    """The task's schedule: a factor on the learning rate as a function of the step."""
    schedule, name = task.schedule(), f"{type(task).__name__}.schedule"
    how = "Return a function of the step, a factor on the learning rate"
    if isinstance(schedule, optim.lr_scheduler.LRScheduler):
        example = {
            "StepLR": "lambda step: 0.1 ** (step // 30)", "ExponentialLR": "lambda step: 0.99 ** step",
            "LambdaLR": "the function that LambdaLR was given",
        }.get(type(schedule).__name__, "lambda step: 1 - step / self.steps")  # fmt: skip
        raise WrongUse(
            f"{name} returned a {type(schedule).__name__} of torch, whose state depends on how often it was called. "
            f"{how}: return {example}"
        )
    if not callable(schedule):
        raise WrongUse(f"{name} returned {described(schedule)}. {how}: return lambda step: 1.0")
    factor = schedule(0)
    if isinstance(factor, bool) or not isinstance(factor, (int, float, np.number)):
        raise WrongUse(f"{name} gives {described(factor)} for step 0. {how}, one number: return lambda step: 1.0")
    return schedule
