"""Which optimizers may update a piece of a weight alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn, optim

from phalanx.errors import WrongUse
from phalanx.task import Task
from phalanx.train.check import lines

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
        where = lines.at(lines.of(type(task).model))
        raise WrongUse(f"the model of {name}{where} has no trainable weight. Check requires_grad.")
    if not pieces:
        nothing = nn.Parameter(torch.zeros(1, 1))
        nothing.logical_name = "nothing"  # type: ignore[attr-defined]
        pieces = [nothing]
    optimizer = task.optimizer(pieces)
    where = lines.at(lines.of(type(task).optimizer))
    if not isinstance(optimizer, optim.Optimizer):
        found = f"returned a {type(optimizer).__name__}{where}"
        raise WrongUse(f"{name}.optimizer {found}. Return a torch.optim.Optimizer.")
    known = {id(piece) for piece in pieces}
    strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if strangers:
        raise WrongUse(
            f"{name}.optimizer updates {len(strangers)} tensors that are not those it was given, so the model would "
            f"learn nothing from it (the first has the shape {tuple(strangers[0].shape)}){where}. Make it from the "
            "parameters that it is called with, not from a model of its own."
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
