"""A task's optimizer where ranks hold parts of weights: over their shards, or over stand-ins for whole weights.

An optimizer that updates each element by itself has this rank's rows. Any other has, of every weight, a parameter of
the whole shape, which has memory and a gradient during an update, on the rank that owns the weight. So a task chooses
weights by shape as it would on one device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from phalanx.parallel.spread import Spread
from phalanx.parallel.weights.matrices import COPY, Matrices, owners
from phalanx.parallel.weights.weight import Weight
from phalanx.task import Task
from phalanx.train.memory import Kept
from phalanx.train.optimizers import Several, make_optimizer, wants_whole

Described = Mapping[str, nn.Parameter]


def spread_optimizer(
    task: Task, spread: Spread, described: Described, shards: Sequence[nn.Parameter], trained: bool, kept: Kept
) -> optim.Optimizer:
    """The task's optimizer for this rank. ``described``: the model's weights as they are on one device."""
    divided = spread.mesh.size(*COPY) > 1 or spread.mesh.size("pp") > 1 or bool(spread.layout.exact)
    weights = {name: weight for name, weight in described.items() if spread.trainable.get(name)}
    if divided and (kept.whole or not kept.tried):
        homes = {name: spread.placement.weights[name].policy.home(spread.device) for name in weights}
        dtype = spread.dtypes.parameter
        stand_ins = [_stand_in(name, weight, homes[name], dtype) for name, weight in weights.items()]
        optimizer = make_optimizer(task, stand_ins, trained)
        if wanted := wants_whole(optimizer):
            _lead(optimizer, wanted, spread)
            return optimizer
    optimizer = make_optimizer(task, shards, trained)
    for name in wants_whole(optimizer) & spread.weights.keys():
        spread.weights[name].whole_state = True
    return optimizer


def _stand_in(name: str, weight: nn.Parameter, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """A parameter of the weight's shape that takes the memory of one number; one number is a row of one."""
    parameter = nn.Parameter(torch.zeros((), dtype=dtype, device=device).expand(weight.shape or (1,)))
    vars(parameter).update(vars(weight))  # what the model's author noted on it
    parameter.logical_name = name  # type: ignore[attr-defined]
    return parameter


def _lead(optimizer: optim.Optimizer, wanted: set[str], spread: Spread) -> None:
    """Have an optimizer of stand-ins update what this rank holds."""
    whole: list[Weight] = []
    made = {p.logical_name: p for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in made.items():
        weight = spread.weights.get(name)
        if weight is not None and name in wanted:
            weight.optimized, weight.whole_state = parameter, True
            whole.append(weight)
    shapes = {name: spread.holding.shapes[name] for name in made if name in wanted}
    stages = {name: spread.holding.stage_ranks(name) for name in shapes}
    owner = owners(shapes, stages, spread.mesh.size(*COPY))
    like = torch.empty(0, dtype=spread.dtypes.parameter, device=spread.device)
    matrices = Matrices(whole, spread.holding, spread.layout, owner, like)
    _give_shards(optimizer, wanted, spread)
    here = {weight.optimized for weight in spread.weights.values() if weight.state_here}
    optimizer.register_step_pre_hook(lambda *_: matrices.gather())
    optimizer.register_step_post_hook(lambda *_: matrices.scatter())
    optimizer.register_step_post_hook(lambda *_: _forget(optimizer, here))
    if isinstance(optimizer, Several):
        optimizer.given = matrices.given


def _forget(optimizer: optim.Optimizer, here: set[nn.Parameter]) -> None:
    """Drop the state that an optimizer began for weights that another rank updates."""
    for parameter in [known for known in optimizer.state if isinstance(known, Tensor) and known not in here]:
        del optimizer.state[parameter]


def _give_shards(optimizer: optim.Optimizer, wanted: set[str], spread: Spread) -> None:
    """Put this rank's rows where a stand-in is updated element by element; keep state of what is updated here."""
    for group in optimizer.param_groups:
        for place, parameter in enumerate(group["params"]):
            weight, kept = spread.weights.get(parameter.logical_name), optimizer.state.pop(parameter, {})
            if weight is None:
                continue
            if parameter.logical_name not in wanted:
                group["params"][place] = weight.shard
                kept = {key: _own_rows(value, weight, parameter, spread) for key, value in kept.items()}
            if kept and weight.state_here:
                optimizer.state[weight.optimized] = kept


def _own_rows(value: Any, weight: Weight, whole: nn.Parameter, spread: Spread) -> Any:
    """What a new optimizer keeps of a weight, of this rank's rows of it."""
    if not isinstance(value, Tensor) or value.shape != whole.shape:
        return value
    part = spread.holding.part(weight.name, value.view(spread.holding.shapes[weight.name]))
    return weight.own_rows(part).reshape(weight.shard.shape).clone()
