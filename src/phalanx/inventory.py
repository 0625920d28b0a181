"""What a model weighs: its parts, their weights, and by arithmetic what a rank holds of them under a layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn, optim

from phalanx.anatomy import Anatomy
from phalanx.layout import Layout
from phalanx.precision import Dtypes
from phalanx.task import Task
from phalanx.words import columns, in_bytes

STATE = {
    optim.SGD: 0, optim.Adafactor: 0, optim.Muon: 0, optim.Adagrad: 1, optim.RMSprop: 1, optim.Rprop: 2, optim.ASGD: 2,
}  # fmt: skip
"""Numbers that an optimizer keeps for each weight, where they are not two, as Adam's are."""


@dataclass(frozen=True)
class Memory:
    """What a rank holds between two steps, in bytes: all but activations, and buffers of what is under way."""

    weights: int
    gradients: int
    optimizer: int

    def __str__(self) -> str:
        total = self.weights + self.gradients + self.optimizer
        found = f"weights {in_bytes(self.weights)}, gradients {in_bytes(self.gradients)}"
        return f"{in_bytes(total)} a rank without activations: {found}, optimizer {in_bytes(self.optimizer)}"


def memory(held: int, trained: int, layout: Layout, dtypes: Dtypes, numbers: int) -> Memory:
    """Of so many weights that a rank has a part in, once ``tp`` and ``pp`` have shared them out.

    ``numbers``: what the optimizer keeps for each.
    """
    shards = layout.fsdp * layout.cp
    weight, gradient, state = (dtype.itemsize for dtype in (dtypes.parameter, dtypes.reduce, dtypes.optimizer))
    return Memory(
        weight * math.ceil(held / (shards if layout.zero == 3 else 1)),
        gradient * math.ceil(trained / (shards if layout.zero >= 2 else 1)),
        numbers * state * math.ceil(trained / shards),
    )


def described_memory(task: Task, model: nn.Module, anatomy: Anatomy, layout: Layout, dtypes: Dtypes) -> Memory:
    """About what a rank will hold, of a model that is only described."""
    found = parts(model, anatomy)
    blocks = [part for part in found if part.name.split(" to ")[0] in anatomy.blocks]
    held, trained = (
        share(sum(getattr(p, of) for p in found), sum(getattr(p, of) for p in blocks), layout)
        for of in ("weights", "trainable")
    )
    return memory(held, trained, layout, dtypes, task_state_numbers(task, model))


def share(weights: int, in_blocks: int, layout: Layout) -> int:
    """About how many weights a rank has a part in: ``pp`` shares the blocks, ``tp`` nearly all."""
    return math.ceil((in_blocks / layout.pp + weights - in_blocks) / layout.tp)


def state_numbers(optimizer: optim.Optimizer) -> int:
    """How many numbers an optimizer will keep for each weight; two where it is not known."""
    momentum = any(group.get("momentum") for group in optimizer.param_groups)
    kept = next((number for kind, number in STATE.items() if isinstance(optimizer, kind)), 2)
    averages = any(group.get("amsgrad") or group.get("centered") for group in optimizer.param_groups)
    return kept + (momentum and kept < 2) + averages


def task_state_numbers(task: Task, model: nn.Module) -> int:
    """The same before there is an optimizer: one is made for stand-ins of the weights."""
    stand_ins = []
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            stand_in = nn.Parameter(torch.zeros([1] * weight.ndim))
            stand_in.logical_name = name  # type: ignore[attr-defined]
            stand_ins.append(stand_in)
    try:
        made = task.optimizer(stand_ins)
    except Exception:  # it wants the weights themselves
        return 2
    return state_numbers(made) if isinstance(made, optim.Optimizer) else 2


@dataclass(frozen=True)
class ModelPart:
    """A module of the model, or several alike in a row."""

    name: str
    kind: str
    weights: int
    trainable: int


def parts(model: nn.Module, anatomy: Anatomy) -> list[ModelPart]:
    """What comes before the blocks, the blocks, what comes after, and what is in none of these; tied weights once."""
    counts = {name: weight.numel() for name, weight in model.named_parameters()}
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    found: list[ModelPart] = []
    for names in (*([name] for name in anatomy.before), *_alike(model, anatomy.blocks), *([n] for n in anatomy.after)):
        own = [name for name in counts if any(name == part or name.startswith(f"{part}.") for part in names if part)]
        kind = type(model.get_submodule(names[0])).__name__
        many = f"{len(names)} x {kind}" if len(names) > 1 else kind
        title = f"{names[0]} to {names[-1]}" if len(names) > 1 else names[0]
        total = sum(counts.pop(name) for name in own if name not in trained)
        learned = sum(counts.pop(name) for name in own if name in trained)
        found.append(ModelPart(title or "(the model)", many, total + learned, learned))
    if counts:
        found.append(
            ModelPart(
                "others",
                ", ".join(list(counts)[:2]),
                sum(counts.values()),
                sum(counts[n] for n in counts if n in trained),
            )
        )
    return [part for part in found if part.weights]


def _alike(model: nn.Module, names: Sequence[str]) -> Iterable[list[str]]:
    """Blocks in a row of one kind and size."""

    def look(name: str) -> tuple[str, int]:
        module = model.get_submodule(name)
        return type(module).__name__, sum(weight.numel() for weight in module.parameters())

    return (list(group) for _, group in groupby(names, key=look))


def table(found: Sequence[ModelPart]) -> list[str]:
    """For the screen, a line each and one for all."""
    total = ModelPart("all", "", sum(p.weights for p in found), sum(p.trainable for p in found))
    rows = [("part", "kind", "weights", "trainable")]
    rows += [(p.name, p.kind, f"{p.weights:,}", f"{p.trainable:,}") for p in (*found, total)]
    return columns(rows, right=(2, 3))
