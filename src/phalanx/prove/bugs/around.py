"""Known bugs around forward and backward: data, the optimizer, shared decisions, ranks that stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace as changed
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from phalanx.data import loader
from phalanx.data.loader import Loader, Plan, Reader, seed_globally
from phalanx.data.order import Order, share
from phalanx.parallel import spread
from phalanx.parallel.communication import collectives
from phalanx.parallel.communication.collectives import Pending
from phalanx.parallel.spread import Spread
from phalanx.parallel.weights.bucket import Bucket, Weight
from phalanx.parallel.weights.replicate import Reduction
from phalanx.prove.bugs.planting import NORM, TOTAL, Replace, agreeing, bug, rank
from phalanx.train import collecting, engine, evaluate
from phalanx.train.engine import Engine

# The optimizer and its weights


@bug(23, "fsdp=2,zero=1", "weights in use|all-gather", "fsdp")
def weights_not_gathered_after_update(replace: Replace) -> None:
    """Each rank updates its rows, and goes on computing with everybody else's old ones."""
    replace(Bucket, "start_gather", lambda self: None)
    replace(Bucket, "finish_gather", lambda self: setattr(self, "is_whole", True))


@bug(23, "fsdp=2", "activations|weights", "fsdp")
def gathered_weights_outlive_update(replace: Replace) -> None:
    """Weights fetched ahead before an update are used after it: the model is a step behind."""
    finish = Bucket.finish_gather
    kept: dict[tuple[int, str], Tensor] = {}

    def finish_gather(self: Any) -> None:
        finish(self)
        for weight in self.weights:
            old = kept.setdefault((id(self), weight.name), weight.full.data.clone())
            weight.full.data.copy_(old)

    replace(Bucket, "finish_gather", finish_gather)


@bug(27, "dp=2", "lr", "dp")
def schedule_stepped_by_every_rank(replace: Replace) -> None:
    """The learning rate's schedule is stepped once a rank, and so decays too early."""
    plain = Engine.set_learning_rate
    replace(Engine, "set_learning_rate", lambda self, step: plain(self, step * self.environment.world))


@bug(27, "dp=2", "lr", "dp")
def schedule_differs_by_rank(replace: Replace) -> None:
    """One rank has resumed its schedule a step later than the others."""
    plain = Engine.set_learning_rate
    replace(Engine, "set_learning_rate", lambda self, step: plain(self, step + self.environment.rank))


@bug(0, "fsdp=2", "weight_decay", "fsdp")
def decay_on_flattened_norms(replace: Replace) -> None:
    """Pieces of sharded weights are told apart by their number of dims, and norms get weight decay."""
    plain = engine.spread_optimizer

    def spread_optimizer(*args: Any) -> Any:
        made = plain(*args)
        for group in made.param_groups:
            group["weight_decay"] = 0.1
        return made

    replace(engine, "spread_optimizer", spread_optimizer)


@bug(29, "fsdp=3", "gradients|weights", "fsdp")
def short_rows_left_out(replace: Replace) -> None:
    """Where a weight's rows do not divide by ranks, the last, shorter run of them is forgotten."""
    plain = Weight.pairs
    replace(Weight, "pairs", lambda self, whole, flat, offset: plain(self, whole, flat, offset)[:1])


@bug(31, "tp=2", "norm", "tp")
def replicas_drift_in_the_optimizer(replace: Replace) -> None:
    """Ranks of tp hold norms alike, and one of them updates them a little differently."""
    plain = Spread.updated

    def updated(self: Any) -> None:
        for name, weight in self.weights.items():
            if self.mesh.index("tp") and "norm" in name:
                weight.piece.data.mul_(1 + 1e-9)
        plain(self)

    replace(Spread, "updated", updated)


@bug(72, "dp=2", "weight", "dp")
def a_rank_begins_with_older_weights(replace: Replace) -> None:
    """A rank that joined late trains before it has taken over the others' weights."""
    plain = spread.fill

    def fill(weights: Any, *args: Any, **kwargs: Any) -> None:
        plain(weights, *args, **kwargs)
        for weight in weights.values():
            weight.piece.data.mul_(1 - 1e-3 * (rank() == 1))

    replace(spread, "fill", fill)


# Shared decisions


@bug(24, "dp=2", "skip", "dp")
def overflow_not_shared(replace: Replace) -> None:
    """Every rank looks at its own gradients to decide whether to skip a step."""

    def change(own: Tensor, agreed: Tensor) -> None:
        if agreed[TOTAL].isnan():
            agreed[TOTAL], agreed[NORM] = own[TOTAL], 1.0

    agreeing(replace, change)


@bug(33, "dp=2", "skip", "dp")
def skip_decided_by_rank_0(replace: Replace) -> None:
    """A step is skipped if rank 0's loss is not a number; another rank's goes into everybody's weights."""

    def change(own: Tensor, agreed: Tensor) -> None:
        first = own.clone()
        dist.broadcast(first, 0)
        if agreed[TOTAL].isnan():
            agreed[TOTAL], agreed[NORM] = first[TOTAL], 1.0

    agreeing(replace, change)


# Data


@bug(35, "dp=2", "samples|ids|hash", "")
def same_order_every_epoch(replace: Replace) -> None:
    """Nobody tells the sampler that an epoch has ended."""
    replace(Order, "epoch", lambda self, step: 0)


@bug(36, "dp=2", "samples|division", "dp")
def every_rank_reads_everything(replace: Replace) -> None:
    """All replicas read the same samples: the effective batch is smaller than it seems."""
    replace(loader, "share", lambda slots, micro_batches, ranks, rank: share(slots, micro_batches, ranks, 0))


@bug(0, "dp=2", "samples|division", "dp")
def samples_repeated_to_fill_up(replace: Replace) -> None:
    """Where samples do not divide by ranks, some are given out twice."""

    def padded(slots: int, micro_batches: int, ranks: int, rank: int) -> list[tuple[int, int]]:
        return [(max(0, a - (rank > 0)), b) for a, b in share(slots, micro_batches, ranks, rank)]

    replace(loader, "share", padded)


@bug(40, "dp=2", "contents", "")
def same_draws_for_every_sample(replace: Replace) -> None:
    """Augmentation is seeded alike for all samples of all workers."""

    def sample(self: Any, index: int, epoch: int) -> Any:
        seed_globally(self.seed, "sample", epoch)
        return self.data[index]

    replace(Reader, "_sample", sample)


@bug(42, "dp=2", "samples|settings", "")
def packing_miscounts_samples(replace: Replace) -> None:
    """The position in the data is counted in packed samples in one place and in plain ones in another."""
    plain = Order.ids

    def ids(self: Order, step: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        return plain(self, step, start, stop) if step == 0 else np.roll(plain(self, step, start, stop), 1)

    replace(Order, "ids", ids)


@bug(41, "dp=2", "wait|collective|run", "dp")
def one_rank_runs_out_of_data(replace: Replace) -> None:
    """One rank has fewer batches than the others, and leaves while they wait."""
    plain = Loader.batches
    replace(Loader, "batches", lambda self, start, stop: plain(self, start, stop - self.rank))


# Evaluation


def _on_held_out(replace: Replace, change: Callable[[Loader, list[Plan]], list[Plan]]) -> None:
    """Have ``change`` spoil what a rank reads of held-out samples."""
    plain = Loader.plans

    def plans(self: Loader, step: int, ids: np.ndarray) -> list[Plan]:
        found = plain(self, step, ids)
        return found if self.order.shuffle else change(self, found)

    replace(Loader, "plans", plans)


@bug(0, "dp=2", "evaluation", "dp")
def held_out_samples_repeated_to_fill_up(replace: Replace) -> None:
    """Where held-out samples do not divide by ranks, a rank evaluates one that another has, too."""

    def longer(plan: Plan) -> Plan:
        before = plan.slots[:1] - 1
        return changed(
            plan, ids=np.concatenate([plan.ids[:1] - 1, plan.ids]), slots=np.concatenate([before, plan.slots])
        )

    def repeated(self: Loader, plans: list[Plan]) -> list[Plan]:
        return [longer(plan) if self.rank and plan.slots[0] else plan for plan in plans]

    _on_held_out(replace, repeated)


@bug(0, "dp=4", "evaluation", "dp")
def padding_counted_in_evaluation(replace: Replace) -> None:
    """A rank that has no held-out sample left computes along with another's, and counts it."""
    _on_held_out(replace, lambda self, plans: [changed(plan, real=True) for plan in plans])


@bug(0, "dp=2", "evaluation", "dp")
def measures_averaged_over_ranks(replace: Replace) -> None:
    """Every rank divides by its own count, and the ratios are averaged."""
    plain = evaluate._agreed

    def agreed(engine: Engine, held_out: Loader, sums: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
        means = {name: table / table[:, 1:].clamp_min(1) for name, table in sums.items()}
        counts = {name: count for name, (_, count) in plain(engine, held_out, sums).items()}
        found = plain(engine, held_out, means)
        return {name: (total / parts * counts[name], counts[name]) for name, (total, parts) in found.items()}

    replace(evaluate, "_agreed", agreed)


@bug(0, "dp=2", "each sample", "dp", task="shapes")
def rows_gathered_in_the_order_of_ranks(replace: Replace) -> None:
    """What is gathered lies as ranks sent it, not as the data has it."""
    plain = collecting.Collected.add

    def add(self: Any, name: str, value: Any, places: np.ndarray, real: bool) -> None:
        turned = np.roll(places, 1) if real and rank() == 1 else places
        plain(self, name, value, turned, real)

    replace(collecting.Collected, "add", add)


# Ranks that stop


def _in_backward_of_rank_1(replace: Replace, act: Callable[[], object]) -> None:
    plain = Spread.backward

    def backward(self: Any, *args: Any) -> None:
        if rank() == 1:
            act()
        plain(self, *args)

    replace(Spread, "backward", backward)


@bug(55, "dp=2", "collective", "dp")
def a_rank_skips_a_collective(replace: Replace) -> None:
    """One rank takes a branch without the collective that the others wait in."""
    plain = Reduction._sum_over_replicas

    def summed(self: Any, bucket: Any) -> None:
        if rank() == 0 or bucket is not self.buckets[-1]:
            plain(self, bucket)

    replace(Reduction, "_sum_over_replicas", summed)


@bug(57, "dp=2", "collective|ended", "dp")
def a_rank_sends_another_size(replace: Replace) -> None:
    """One rank's part of a collective is shorter than the others'."""
    plain = collectives.all_reduce

    def all_reduce(tensor: Tensor, group: Any) -> Pending:
        return plain(tensor[: len(tensor) // 2] if rank() == 1 and tensor.numel() > 100 else tensor, group)

    replace(collectives, "all_reduce", all_reduce)


@bug(60, "dp=2", "MemoryError", "dp")
def memory_runs_out_on_one_rank(replace: Replace) -> None:
    """One rank cannot allocate, and the others wait for it."""

    def fail() -> None:
        raise MemoryError("cannot allocate")

    _in_backward_of_rank_1(replace, fail)


@bug(61, "dp=2", "ended|collective", "dp")
def a_rank_is_killed(replace: Replace) -> None:
    """One rank is ended from outside."""
    _in_backward_of_rank_1(replace, lambda: os.kill(os.getpid(), signal.SIGKILL))
