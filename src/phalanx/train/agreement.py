"""Before the first step: do all ranks mean the same job? What differs would train wrongly, or hang, and say nothing."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from phalanx import counter
from phalanx.errors import WrongUse
from phalanx.parallel import collectives

if TYPE_CHECKING:
    from phalanx.train.engine import Engine

ADVICE = {
    "settings": "Start every rank with the same task and settings.",
    "layout": "Start every rank with the same layout.",
    "data": "Task.data must give every rank the same samples under the same indices: seed what is random in it.",
    "model": "Task.model must build the same weights on every rank: nothing in it may depend on the rank.",
}


def check_agreement(engine: Engine) -> None:
    """Compare fingerprints over all ranks; name what differs and where."""
    if engine.mesh.world is None:
        return
    facts = _facts(engine)
    own = torch.tensor([counter.key(facts[name]) for name in ADVICE], device=engine.device)
    every = own.new_empty(engine.environment.world, len(own))
    collectives.all_gather(every, own, engine.mesh.world).wait()
    for column, (name, advice) in enumerate(ADVICE.items()):
        different = [rank for rank, value in enumerate(every[:, column].tolist()) if value != every[0, column]]
        if different:
            ranks = ", ".join(map(str, different[:8]))
            raise WrongUse(
                f"the {name} of rank {ranks} is not that of rank 0 "
                f"(rank {engine.environment.rank} has: {facts[name][:200]}). {advice}"
            )


def _facts(engine: Engine) -> dict[str, str]:
    task = engine.task
    fields = {f.name: getattr(task, f.name) for f in dataclasses.fields(task)}
    plain = {name: value for name, value in fields.items() if isinstance(value, (bool, int, float, str, tuple))}
    sample = engine.loader.reader.read_first()
    return {
        "settings": f"{type(task).__name__}({', '.join(f'{n}={v}' for n, v in plain.items())})",
        "layout": str(engine.layout),
        "data": f"{engine.order.size} samples, the first one {_digest(sample)}",
        "model": ", ".join(f"{name} {tuple(weight.shape)}" for name, weight in engine.spread.weights.items()),
    }


def _digest(value: Any) -> str:
    """A short hash of a sample's contents."""
    found = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, dict):
            for name in sorted(item, key=str):
                found.update(str(name).encode())
                add(item[name])
        elif isinstance(item, (list, tuple)):
            for inner in item:
                add(inner)
        elif isinstance(item, (Tensor, np.ndarray)):
            found.update(np.ascontiguousarray(torch.as_tensor(item).float().cpu().numpy()).tobytes())
        else:
            found.update(repr(item).encode())

    add(value)
    return found.hexdigest()[:12]
