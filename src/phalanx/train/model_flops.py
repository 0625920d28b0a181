"""What a model costs to train on a sample, in FLOPs: forward and backward as one device runs them, each once.

They are counted by torch's own formulas on tensors that have shapes and no memory, so that a model of any kind and size
can be counted. What a layout computes again or twice is not in it, nor the gradients of frozen weights. Code that asks
for a value, to refuse a bad one, gets 0; a model whose shapes depend on values cannot be counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.data.adopted import collate_of, training_samples
from phalanx.data.planned import training_order
from phalanx.data.seeding import sample_at
from phalanx.parallel.torch_private import FakeTensor, FakeTensorMode
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.parameters import building
from phalanx.task import Batch, Task, as_loss, called
from phalanx.train.parameter_groups import frozen_first
from phalanx.train.profile.flops import FlopCount
from phalanx.trees import mapped

SAMPLES = 2
"""So many are counted: some models refuse a batch of one."""


@dataclass(frozen=True)
class ModelFlops:
    """What training costs, for each sample."""

    a_sample: float = 0.0
    why: str = ""
    """Why it is not known."""


def model_flops(task: Task) -> ModelFlops:
    """Of a task, if they can be counted."""
    try:
        return ModelFlops(flops_per_sample(task))
    except Exception as error:  # the run is more important
        return ModelFlops(why=f"its FLOPs could not be counted ({error})")


class _Counting(FlopCount):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0
        return super().__torch_dispatch__(func, types, args, kwargs)


def flops_per_sample(task: Task) -> float:
    """The mean over some of the first samples, and over the task's turns. What the task's code raises is raised."""
    data = training_samples(task)
    ids = training_order(task, data).ids(0)[:SAMPLES]
    samples = [sample_at(data, int(index), task.seed) for index in ids]
    model = Blueprint(building(task), task.seed).model
    weights = dict(model.named_parameters())
    fake = next((w.fake_mode for w in weights.values() if isinstance(w, FakeTensor)), None)
    if fake is None:
        raise ValueError("its model has no weights")
    trainable = [name for name, weight in weights.items() if weight.requires_grad]
    callbacks = [*task.callbacks(), *frozen_first(weights)]
    for each in callbacks:
        each.on_model(trainable)
    turns = task.turns or ("",)
    total = 0
    for turn in turns:
        for name in trainable:
            trained = task.trains(turn, name) and all(each.trains(0, name) for each in callbacks)
            weights[name].requires_grad_(trained)
        total += _counted(task, model, collate_of(task, data)(list(samples)), fake, turn)
    if not total:
        raise ValueError("torch has formulas for none of its operations")
    return total / len(turns) / len(samples)


def _counted(task: Task, model: torch.nn.Module, tensors: dict[str, Any], fake: FakeTensorMode, turn: str) -> int:
    found = 0

    def add(flops: int) -> None:
        nonlocal found
        found += flops

    def placed(tensor: Tensor) -> Tensor:
        return fake.from_tensor(tensor.float() if tensor.is_floating_point() else tensor)

    batch = Batch({name: mapped(placed, value) for name, value in tensors.items()})
    batch.turn = turn
    model.train()
    with fake, _Counting(add):
        loss = as_loss(task.loss(called(model, task.inputs(batch)), batch), task)
        loss.total.sum().backward()
    return found
