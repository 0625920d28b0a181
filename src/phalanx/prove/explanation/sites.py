"""Which code is responsible for what a finding names."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from phalanx.data.loader import Loader
from phalanx.data.order import Order
from phalanx.losses import cross_entropy
from phalanx.parallel.axes.batchnorm import KINDS
from phalanx.parallel.axes.pipeline import Pipeline
from phalanx.parallel.communication import differentiable
from phalanx.parallel.weights.bucket import Bucket
from phalanx.parallel.weights.holding import Holding
from phalanx.parallel.weights.replicate import Reduction
from phalanx.prove.explanation.finding import Finding
from phalanx.prove.ranks.record import WHOLE, bare
from phalanx.task import Task
from phalanx.train.engine import Engine
from phalanx.train.step import train_step
from phalanx.train.variant import Variant

SUMS = {
    "dp": Reduction.sum_over_replicas,
    "fsdp": Bucket.start_scatter,
    "cp": Bucket.start_scatter,
    "ep": Bucket.start_scatter,
    "tp": Holding.complete,
    "pp": Holding.complete,
    "micro-batches": Bucket.collect,
}
"""By axis, where gradients are added up."""
BACKWARD: dict[str, Any] = {
    "tp": differentiable.share,
    "tp by time": differentiable.gather,
    "cp gather": differentiable.gather,
    "cp ulysses": differentiable.exchange,
    "ep": differentiable.exchange_rows,
    "pp": Pipeline.backward,
}
"""By axis, and how it is used, the collective behind a block's modules whose backward sums or sends."""


def loss_site(axes: Sequence[str], task: Task) -> str:
    """Where a loss is computed that is wrong of an output that is right: over parts of a vocabulary or a sequence."""
    return location(cross_entropy) if {"tp", "cp"} & set(axes) else method_site(task, "loss")


def method_site(task: Task, method: str) -> str:
    """Where a task's own method is, and not what a proof has put before it."""
    for kind in type(task).__mro__:
        if method in vars(kind) and not issubclass(kind, Variant):
            return location(vars(kind)[method])
    return ""


def site(finding: Finding, model: nn.Module, task: Task, at: Any = None) -> str:
    """File and line, or nothing where they cannot be known; ``at`` is what is responsible for all of its rung."""
    name = finding.name
    if finding.rung == "loss":
        return loss_site(finding.axes, task)
    if finding.rung in ("activations", "gradients of activations"):
        kind = _own_class(model, bare(name))
        return method_site(task, "model") if kind.__module__.startswith("torch.") else location(kind)
    if finding.rung == "samples" and name.startswith("contents"):
        return method_site(task, "data")
    if finding.rung == "samples":
        return location(Order if name.startswith("hash") else Loader.plans)
    if finding.rung == "settings":
        return location(Engine.set_learning_rate) if name.startswith("lr") else ""
    if finding.rung.startswith("gradients") or finding.rung == "communication":
        return location(SUMS[finding.axes[0]]) if finding.axes and finding.axes[0] in SUMS else location(train_step)
    if finding.rung == "buffers" and not isinstance(owner := model.get_submodule(name.rpartition(".")[0]), KINDS):
        return location(type(owner))
    return "" if at is None else location(at)


def _own_class(model: nn.Module, name: str) -> type[nn.Module]:
    """Of a module, or of the nearest around it that is not torch's own."""
    while name and name != WHOLE:
        kind = type(model.get_submodule(name))
        if not kind.__module__.startswith("torch."):
            return kind
        name = name.rpartition(".")[0]
    return type(model)


def location(thing: Any) -> str:
    """File and line of a class or function, from here if it is below."""
    try:
        file, line = Path(inspect.getsourcefile(thing) or "").resolve(), inspect.getsourcelines(thing)[1]
    except (OSError, TypeError):
        return ""
    return f"{file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}:{line}"
