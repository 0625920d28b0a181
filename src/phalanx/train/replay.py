"""Replay: all ranks compute the same micro-batch; whoever gets other bits than most has a bad device.

Weights are taken as the ranks have them: where replicas differ in those, that is what is found.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phalanx.errors import WrongUse
from phalanx.parallel.axes.schedules import Action
from phalanx.train.step import forward

if TYPE_CHECKING:
    from phalanx.train.engine import Engine


def replay(engine: Engine, step: int) -> list[int]:
    """The ranks whose gradients of a step's first micro-batch differ from most ranks'; all, where no two agree more.

    All ranks must call it, between two steps. Nothing that training depends on is changed.
    """
    layout = engine.layout
    if layout.tp * layout.cp * layout.pp * layout.ep > 1:
        raise WrongUse(
            f"the ranks of {layout} compute different parts of a micro-batch, so their bits cannot be compared. "
            "Replay under dp and fsdp alone."
        )
    every = engine.mesh.world.gathered(_bits(engine, step))
    found = [bytes(row) for row in every.tolist()]
    (usual, most), *_ = Counter(found).most_common()
    return [rank for rank, bits in enumerate(found) if bits != usual or 2 * most <= len(found)]


def _bits(engine: Engine, step: int) -> Tensor:
    """A hash of all the gradients this rank makes of a step's first micro-batch."""
    spread, reduction, found = engine.spread, engine.spread.reduction, {}

    def note(name: str, gradient: Tensor) -> None:
        whole = gradient.to_dense() if gradient.is_sparse else gradient
        flat = whole.detach().cpu().contiguous().view(-1).view(torch.uint8)
        found[name] = hashlib.sha256(flat.numpy().data).digest()

    was, reduction.on_gradient = reduction.on_gradient, note
    try:
        reduction.start_step()
        spread.samples.start(engine.task.turn(step), 1, None)  # all have the same ones
        forward(engine, step, engine.loader.first(step), Action("forward", 0, 0))
        spread.backward(Action("backward", 0, 0), engine.loss_scale.value, last=False, hold=True)
        reduction.finish_backward()
    finally:
        reduction.on_gradient = was
        reduction.start_step()  # drops what was collected
        if spread.fp8 is not None:
            spread.fp8.forget()
    digest = hashlib.sha256(b"".join(name.encode() + bits for name, bits in sorted(found.items()))).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(engine.device)
