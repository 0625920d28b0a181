"""Known bugs of the optimizer and its weights: rates, groups, rows, and copies that are not renewed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.prove.bugs import seams
from phalanx.prove.bugs.planting import bug, rank
from phalanx.prove.bugs.seams import Replace


@bug(23, "fsdp=2,zero=1", "weights in use|all-gather", "fsdp")
def weights_not_gathered_after_update(replace: Replace) -> None:
    """Each rank updates its rows, and goes on computing with everybody else's old ones."""
    replace(seams.START_GATHER, lambda self: None)
    replace(seams.FINISH_GATHER, lambda self: setattr(self, "is_whole", True))


@bug(23, "fsdp=2", "activations|weights", "fsdp")
def gathered_weights_outlive_update(replace: Replace) -> None:
    """Weights fetched ahead before an update are used after it: the model is a step behind."""
    finish = seams.FINISH_GATHER.plain
    kept: dict[tuple[int, str], Tensor] = {}

    def finish_gather(self: Any) -> None:
        finish(self)
        for weight in self.weights:
            old = kept.setdefault((id(self), weight.name), weight.full.data.clone())
            weight.full.data.copy_(old)

    replace(seams.FINISH_GATHER, finish_gather)


@bug(0, "fsdp=2", "activations|weights", "fsdp")
def weights_gathered_in_bfloat16(replace: Replace) -> None:
    """Weights are gathered in a lower precision than they are computed with."""
    plain = seams.FINISH_GATHER.plain

    def finish_gather(self: Any) -> None:
        plain(self)
        for weight in self.weights:
            if weight.full.is_floating_point():
                weight.full.data.copy_(weight.full.data.to(torch.bfloat16))

    replace(seams.FINISH_GATHER, finish_gather)


@bug(27, "dp=2", "lr", "dp")
def schedule_stepped_by_every_rank(replace: Replace) -> None:
    """The learning rate's schedule is stepped once a rank, and so decays too early."""
    plain = seams.LEARNING_RATE.plain
    replace(seams.LEARNING_RATE, lambda self, step: plain(self, step * self.environment.world))


@bug(27, "dp=2", "lr", "dp")
def schedule_differs_by_rank(replace: Replace) -> None:
    """One rank has resumed its schedule a step later than the others."""
    plain = seams.LEARNING_RATE.plain
    replace(seams.LEARNING_RATE, lambda self, step: plain(self, step + self.environment.rank))


@bug(0, "fsdp=2", "weight_decay", "fsdp")
def decay_on_flattened_norms(replace: Replace) -> None:
    """Pieces of sharded weights are told apart by their number of dims, and norms get weight decay."""
    plain = seams.MAKE_OPTIMIZER.plain

    def spread_optimizer(task: Any, spread: Any, *rest: Any) -> Any:
        made = plain(task, spread, *rest)
        for group in made.param_groups if spread.layout.fsdp > 1 else ():
            group["weight_decay"] = 0.1
        return made

    replace(seams.MAKE_OPTIMIZER, spread_optimizer)


@bug(29, "fsdp=3", "gradients|weights", "fsdp")
def short_rows_left_out(replace: Replace) -> None:
    """Where a weight's rows do not divide by ranks, the last, shorter run of them is forgotten."""
    plain = seams.PAIRS.plain
    replace(seams.PAIRS, lambda self, whole, place: plain(self, whole, place)[:1])


@bug(31, "tp=2", "norm", "tp")
def replicas_drift_in_the_optimizer(replace: Replace) -> None:
    """Ranks of tp hold norms alike, and one of them updates them a little differently."""
    plain = seams.UPDATED.plain

    def updated(self: Any, copied: Any = frozenset()) -> None:
        for name, weight in self.weights.items():
            if self.mesh.index("tp") and "norm" in name:
                weight.shard.data.mul_(1 + 1e-9)
        plain(self, copied)

    replace(seams.UPDATED, updated)


@bug(72, "dp=2", "weight", "dp")
def a_rank_begins_with_older_weights(replace: Replace) -> None:
    """A rank that joined late trains before it has taken over the others' weights."""
    plain = seams.FILL.plain

    def fill(weights: Any, *args: Any, **kwargs: Any) -> None:
        plain(weights, *args, **kwargs)
        for weight in weights.values():
            weight.shard.data.mul_(1 - 1e-3 * (rank() == 1))

    replace(seams.FILL, fill)
