"""A task's optimizer and schedule, made and checked; which optimizers may update a shard of a weight alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn, optim

from phalanx.errors import WrongUse
from phalanx.task import Task, rates
from phalanx.traces import described
from phalanx.train.check import lines
from phalanx.train.parameter_groups import split

ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adagrad, optim.Adadelta, optim.Adamax,
    optim.RMSprop, optim.Rprop, optim.ASGD,
)  # fmt: skip
"""Each element's update depends on that element alone, so rows can be updated where they live."""
SCHEDULE = "Return a function of the step, a factor on the learning rate"


def untrainable(task: Task) -> WrongUse:
    where = lines.at(lines.of(type(task).model))
    return WrongUse(f"the model of {type(task).__name__}{where} has no trainable weight. Check requires_grad.")


def make_optimizer(task: Task, shards: Sequence[nn.Parameter], trained: bool) -> optim.Optimizer:
    """The task's optimizer over this rank's shards, or over whole weights; refused where it could not train them.

    ``trained`` says whether any rank has one: a stage of a pipeline may be all frozen.
    """
    name = type(task).__name__
    if not trained:
        raise untrainable(task)
    if not shards:
        nothing = nn.Parameter(torch.zeros(1, 1))
        nothing.logical_name = "nothing"  # type: ignore[attr-defined]
        shards = [nothing]
    made = task.optimizer(shards)
    for part in made.values() if isinstance(made, Mapping) else [made]:
        if isinstance(part, optim.Optimizer):
            split(part, task)
    optimizer = Several(made, name) if isinstance(made, Mapping) else made
    where = lines.at(lines.of(type(task).optimizer))
    if not isinstance(optimizer, optim.Optimizer):
        raise WrongUse(f"{name}.optimizer returned {_no_optimizer(optimizer, where)}")
    known = {id(shard) for shard in shards}
    strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if strangers:
        raise WrongUse(
            f"{name}.optimizer updates {len(strangers)} tensors that are not those it was given, so the model would "
            f"learn nothing from it (the first has the shape {tuple(strangers[0].shape)}){where}. Make it from the "
            "parameters that it is called with, not from a model of its own."
        )
    if task.moments != "float32" and task.moments not in {group.get("moments") for group in optimizer.param_groups}:
        raise WrongUse(
            f"moments={task.moments} has no effect: {name}.optimizer makes another optimizer{where}. Return "
            "phalanx.optim.AdamW(params, moments=self.moments, seed=self.seed), or leave moments out."
        )
    if task.optimizer_kind == "muon" and not any(isinstance(part, optim.Muon) for part in parts_of(optimizer)):
        raise WrongUse(
            f"optimizer_kind=muon has no effect: {name}.optimizer makes another optimizer{where}. Leave one of the two "
            "out."
        )
    if any(isinstance(part, optim.LBFGS) for part in parts_of(optimizer)):
        raise WrongUse("LBFGS evaluates the loss many times in a step. Use an optimizer with one gradient a step.")
    if any(isinstance(part, optim.SparseAdam) for part in parts_of(optimizer)):
        raise WrongUse(
            f"SparseAdam takes sparse gradients, and those of nn.Embedding(sparse=True) are dense{where}. Use Adam "
            "or AdamW: every row is updated."
        )
    for group in optimizer.param_groups:
        group["initial_lr"] = float(group["lr"])
    return optimizer


def parts_of(optimizer: optim.Optimizer) -> list[optim.Optimizer]:
    """The optimizers that one consists of."""
    return list(optimizer.named.values()) if isinstance(optimizer, Several) else [optimizer]


def wants_whole(optimizer: optim.Optimizer) -> set[str]:
    """Names of weights that it must be given whole: those of optimizers not known to update each element by itself."""
    return {
        weight.logical_name
        for part in parts_of(optimizer)
        if not getattr(type(part), "elementwise", isinstance(part, ELEMENTWISE))
        for group in part.param_groups
        for weight in group["params"]
    }


class Several(optim.Optimizer):
    """Several optimizers, each of weights of its own, as one: their groups and their state are its own."""

    def __init__(self, named: Mapping[str, optim.Optimizer], task: str) -> None:
        groups = []
        for name, optimizer in named.items():
            if not isinstance(optimizer, optim.Optimizer):
                raise WrongUse(f"{task}.optimizer gave for {name!r} a {type(optimizer).__name__}, no optimizer.")
            groups += optimizer.param_groups
        every = [weight for group in groups for weight in group["params"]]
        if not every:
            raise WrongUse(f"{task}.optimizer gave optimizers that have no weights. Give each its own.")
        known: set[int] = set()
        for weight in every:
            if id(weight) in known:
                raise WrongUse(
                    f"{task}.optimizer gave optimizers that share weights, {weight.logical_name} first. Give each its "
                    "own; weights are told apart by `is`, as in [p for p in params if not any(p is q for q in hidden)]."
                )
            known.add(id(weight))
        super().__init__(every, {})
        self.named, self.param_groups = dict(named), groups
        self.given: Callable[[nn.Parameter], bool] = lambda weight: weight.grad is not None
        """Whether a weight has a gradient, on this rank or where it is updated."""
        for optimizer in named.values():
            self.state.update(optimizer.state)
            optimizer.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Each optimizer that was given a gradient updates."""
        for optimizer in self.named.values():
            if any(self.given(weight) for group in optimizer.param_groups for weight in group["params"]):
                optimizer.step()


def attributes(optimizer: optim.Optimizer) -> dict[str, Any]:
    """What an optimizer keeps beside its groups and its state; of several, each under its name."""
    if not isinstance(optimizer, Several):
        return vars(optimizer)
    return {f"{name}.{key}": value for name, part in optimizer.named.items() for key, value in vars(part).items()}


def set_attribute(optimizer: optim.Optimizer, name: str, value: Any) -> None:
    if isinstance(optimizer, Several):
        part, _, name = name.rpartition(".")
        optimizer = optimizer.named[part]
    setattr(optimizer, name, value)


def _no_optimizer(value: object, where: str) -> str:
    if isinstance(value, type):
        made = f"{value.__name__}(params, lr=...)"
        return f"the class {value.__name__}{where}. Return one made from the parameters: {made}."
    if isinstance(value, (tuple, list)):
        return (
            f"a {type(value).__name__}{where}. Return one torch.optim.Optimizer, or several in a dict; several rates "
            "are its parameter groups, and a schedule is the task's schedule(), a function of the step."
        )
    return f"a {type(value).__name__}{where}. Return a torch.optim.Optimizer."


def make_schedule(task: Task) -> Callable[[int], float]:
    """The task's schedule, a factor on the learning rate as a function of the step, refused where it is none."""
    for name, schedule in schedules(task).items():
        _check_schedule(schedule, name)
    return rates(task)


def schedules(task: Task) -> dict[str, Any]:
    """What the task gives for its schedule, or for that of each turn, each with a name for it."""
    given, name = task.schedule(), f"{type(task).__name__}.schedule"
    return {f"{name}[{turn!r}]": each for turn, each in given.items()} if isinstance(given, Mapping) else {name: given}


def _check_schedule(schedule: object, name: str) -> None:
    if isinstance(schedule, optim.lr_scheduler.LRScheduler):
        example = {
            "StepLR": "lambda step: 0.1 ** (step // 30)", "ExponentialLR": "lambda step: 0.99 ** step",
            "LambdaLR": "the function that LambdaLR was given",
        }.get(type(schedule).__name__, "lambda step: 1 - step / self.steps")  # fmt: skip
        raise WrongUse(
            f"{name} returned a {type(schedule).__name__} of torch, whose state depends on how often it was called. "
            f"{SCHEDULE}: return {example}"
        )
    if not callable(schedule):
        raise WrongUse(f"{name} returned {described(schedule)}. {SCHEDULE}: return lambda step: 1.0")
    check_factor(schedule(0), name, 0)


def check_factor(factor: object, name: str, step: int) -> None:
    """Refuse what a schedule gives that is no factor on a learning rate."""
    if isinstance(factor, bool) or not isinstance(factor, (int, float, np.number)):
        what = described(factor)
    elif not 0 <= float(factor) < math.inf:
        what = str(factor)
    else:
        return
    raise WrongUse(f"{name} gives {what} for step {step}. {SCHEDULE}, one number from 0 on: return lambda step: 1.0")
