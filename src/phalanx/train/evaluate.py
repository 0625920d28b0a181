"""Evaluation: sums and counts over held-out data, every sample counted once at any world size."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from phalanx.data.loader import Loader
from phalanx.errors import WrongUse
from phalanx.parallel import collectives
from phalanx.parallel.exact import fold
from phalanx.task import as_loss
from phalanx.train.rounds import Measured
from phalanx.train.step import by_leaf
from phalanx.train.totals import added_up, counted, spelled_out

if TYPE_CHECKING:
    from phalanx.train.engine import Engine


@torch.no_grad()
def evaluate(
    engine: Engine, loader: Loader, batches: int | None = None, on_batch: Callable[[], None] | None = None
) -> dict[str, float]:
    """What ``Task.evaluate`` measures, each as the global sum over the global count."""
    task, model = engine.task, engine.spread.model
    model.eval()
    sums: dict[str, torch.Tensor] = {}
    zero = torch.zeros(len(loader.leaves) or 1, 2, dtype=torch.float64, device=engine.device)
    for batch in loader.batches(0, min(loader.order.steps_per_epoch, batches or loader.order.steps_per_epoch)):
        if on_batch is not None:
            on_batch()
        actions = engine.spread.forwards(len(batch.micro_batches))
        engine.spread.start(batch.micro_batches, actions)
        measured = Measured(engine, loader, batch, task.evaluate)
        for action in actions:
            micro = batch.micro_batches[action.micro]
            measures = measured(action)
            if measures is None and not engine.spread.gives_loss(action):
                continue
            if not isinstance(measures, dict):
                raise WrongUse(
                    f"{type(task).__name__}.evaluate gave a {type(measures).__name__}. "
                    'Return a dict of sums and counts, e.g. {"loss": phalanx.Loss(total, count)}.'
                )
            for name, value in measures.items():
                loss = as_loss(value, task, f"evaluate, for {name!r},")
                row = action.micro if loader.leaves else 0
                for key, one in spelled_out(name, loss).items():
                    sums.setdefault(key, zero.clone())[row] += counted(one, zero[0]) * micro.real
    engine.spread.rest()
    model.train()
    names = engine.spread.from_last_stage(sorted(sums))
    table = torch.stack([sums.get(name, zero) for name in names])
    if loader.leaves:
        every = engine.gathered(table.transpose(0, 1)).flatten(0, 1)
        agreed = fold(by_leaf(engine, every))
    else:
        agreed = table[:, 0] * (engine.mesh.index("cp", "tp") == 0)  # their ranks have the same samples
        collectives.all_reduce(agreed, engine.mesh.world).wait()
    return added_up(
        {
            name: total / count if count else float("nan")
            for name, (total, count) in zip(names, agreed.tolist(), strict=True)
        }
    )
