"""What a task wants to know of every sample before the first step, on one device, by a plain loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from phalanx.data.joined import JoinedSamples
from phalanx.data.seeding import seed_globally
from phalanx.prove.reference.hostile import wide_batch

if TYPE_CHECKING:
    from phalanx.prove.reference.loop import Reference


def known_beforehand(reference: Reference) -> dict[str, Tensor]:
    """Join it to the samples that are trained on, and give what there is of the held-out ones."""
    if reference.task.beforehand() is None:
        return {}
    reference.data = JoinedSamples(reference.data, _computed(reference, reference.data))
    seed_globally(reference.task.seed, "held out")
    held = reference.task.held_out()
    return {} if held is None else _computed(reference, held)


@torch.no_grad()
def _computed(reference: Reference, data: Any) -> dict[str, Tensor]:
    task, decisions = reference.task, reference.decisions
    measure = task.beforehand()
    assert measure is not None
    parts: dict[str, list[Tensor]] = {}
    reference.model.eval()
    decisions.resting = True
    for start in range(0, len(data), task.global_batch):
        places = np.arange(start, min(start + task.global_batch, len(data)))
        batch = wide_batch(task, data, places)
        with reference.randomness.scope("task"):
            output = reference.output(start // task.global_batch, places - start, batch)
            for name, rows in measure(output, batch).items():
                parts.setdefault(name, []).append(rows.detach())
    decisions.resting = False
    reference.model.train()
    return {name: torch.cat(rows) for name, rows in parts.items()}
