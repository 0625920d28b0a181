"""Evaluation: sums and counts over held-out data, and what is gathered of it, every sample once at any world size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx.data.joined import JoinedSamples
from phalanx.data.loader import Loader
from phalanx.errors import WrongUse
from phalanx.logits import Logits
from phalanx.parallel.communication.exact import fold
from phalanx.task import Task, as_loss
from phalanx.train.collecting import Collected, Gathered, summarised
from phalanx.train.rounds import Measured
from phalanx.train.totals import added_up, by_leaf, counted, spelled_out

if TYPE_CHECKING:
    from phalanx.train.engine import Engine


@dataclass
class Evaluated:
    """What an evaluation found, the same on every rank but for what was gathered."""

    sums: dict[str, tuple[float, float]]
    """Totals and counts over all samples."""
    gathered: Gathered | None
    """On rank 0, what there is a row of for every sample."""
    numbers: dict[str, float]
    """What the task's `summarise` made of that."""

    def results(self) -> dict[str, float]:
        ratios = {n: total / count if count else float("nan") for n, (total, count) in self.sums.items()}
        return added_up(ratios) | self.numbers


def evaluate(
    engine: Engine, loader: Loader, batches: int | None = None, on_batch: Callable[[], None] = lambda: None
) -> Evaluated:
    """What ``Task.evaluate`` measures over all samples, or so many batches of them."""
    task, order = engine.task, loader.order
    if task.beforehand() is not None and not isinstance(loader.reader.data, JoinedSamples):
        raise WrongUse(
            f"these samples do not have what {type(task).__name__}.beforehand gives of each. Evaluate on "
            "engine.held_out as it is made, or on engine.in_order(engine.loader.reader.data, 'data')."
        )
    steps = min(order.steps_per_epoch, batches or order.steps_per_epoch)
    sums, collected = computed(engine, loader, steps, task.evaluate, on_batch)
    totals = totals_over_ranks(engine, loader, sums)
    on_batch()
    gathered, any_rows = collected.gathered(engine, min(order.size, steps * order.global_batch))
    on_batch()
    numbers = summarised(engine, gathered) if any_rows else {}
    twice = sorted(totals.keys() & numbers.keys())
    if twice:
        raise WrongUse(
            f"{type(task).__name__}.evaluate and .summarise both measure {twice[0]!r}. Give one of them another name."
        )
    return Evaluated(totals, gathered, numbers)


@torch.no_grad()
def computed(
    engine: Engine,
    loader: Loader,
    steps: int,
    measure: Callable[..., Mapping[str, Any]],
    on_batch: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Tensor], Collected]:
    """This rank's sums and rows of what a function measures."""
    task, model = engine.task, engine.spread.model
    model.eval()
    sums: dict[str, Tensor] = {}
    zero = torch.zeros(len(loader.leaves) or 1, 2, dtype=torch.float64, device=engine.device)
    collected = Collected(task)
    for batch in loader.batches(0, steps):
        on_batch()
        actions = engine.spread.forwards(len(batch.micro_batches))
        engine.spread.start(batch.micro_batches, actions)
        measured = Measured(engine, loader, batch, measure)
        for action in actions:
            micro = batch.micro_batches[action.micro]
            measures = measured(action)
            if measures is None and not engine.spread.gives_loss(action):
                continue
            for name, value in checked(task, measures).items():
                value = value.tensor() if isinstance(value, Logits) else value
                if isinstance(value, (Tensor, list)):
                    collected.add(name, value, batch.step * loader.order.global_batch + micro.slots, micro.real)
                    continue
                loss = as_loss(value, task, f"evaluate, for {name!r},")
                row = action.micro if loader.leaves else 0
                for key, one in spelled_out(name, loss).items():
                    sums.setdefault(key, zero.clone())[row] += counted(one, zero[0]) * micro.real
    engine.spread.rest()
    model.train()
    every = {name for said in engine.mesh.world.all_gather_words(sorted(sums)) for name in said}
    return {name: sums.get(name, zero) for name in sorted(every)}, collected  # some may be of some samples alone


def checked(task: Task, measures: Any) -> Mapping[str, Any]:
    """What a task's `evaluate` gave, if it is measures by name."""
    if not isinstance(measures, Mapping):
        raise WrongUse(
            f"{type(task).__name__}.evaluate gave a {type(measures).__name__}. "
            'Return a dict of sums and counts, e.g. {"loss": phalanx.Loss(total, count)}, or of tensors to be gathered.'
        )
    return measures


def totals_over_ranks(engine: Engine, loader: Loader, sums: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Totals and counts over all ranks."""
    if not sums:
        return {}
    table = torch.stack(list(sums.values()))
    if loader.leaves:
        every = engine.mesh.world.gathered(table.transpose(0, 1)).flatten(0, 1)
        agreed = fold(by_leaf(engine, every))
    else:
        agreed = table[:, 0] * engine.mesh.counts_samples
        engine.mesh.world.all_reduce(agreed).wait()
    return {name: (total, count) for name, (total, count) in zip(sums, agreed.tolist(), strict=True)}
