"""Known bugs of data: which samples a rank reads, in training and in evaluation, and what it makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as changed
from typing import Any

import numpy as np
from torch import Tensor

from phalanx.data.loader import Loader, MicroBatchPlan
from phalanx.data.order import Order
from phalanx.data.seeding import SampleReader, seed_globally
from phalanx.prove.bugs import seams
from phalanx.prove.bugs.planting import bug, rank
from phalanx.prove.bugs.seams import Replace

# Training


@bug(35, "dp=2", "samples|ids|hash", "")
def same_order_every_epoch(replace: Replace) -> None:
    """Nobody tells the sampler that an epoch has ended."""
    replace(seams.EPOCH, lambda self, step: 0)


@bug(36, "dp=2", "samples|division", "dp")
def every_rank_reads_everything(replace: Replace) -> None:
    """All replicas read the same samples: the effective batch is smaller than it seems."""
    plain = seams.SHARE.plain
    replace(seams.SHARE, lambda slots, micro_batches, ranks, rank, tokens=None: plain(slots, micro_batches, ranks, 0))


@bug(0, "dp=2", "samples|division", "dp")
def samples_repeated_to_fill_up(replace: Replace) -> None:
    """Where samples do not divide by ranks, some are given out twice."""
    plain = seams.SHARE.plain

    def padded(slots: int, micro_batches: int, ranks: int, rank: int, tokens: Any = None) -> list[tuple[int, int]]:
        return [(max(0, a - (rank > 0)), b) for a, b in plain(slots, micro_batches, ranks, rank)]

    replace(seams.SHARE, padded)


@bug(40, "dp=2", "contents", "")
def same_draws_for_every_sample(replace: Replace) -> None:
    """Augmentation is seeded alike for all samples of all workers."""

    def read(self: SampleReader, index: int, visit: int = 0) -> Any:
        seed_globally(self.seed, "sample", visit)
        return self.data[index]

    replace(seams.SAMPLE, read)


@bug(40, "dp=2", "contents", "")
def same_draws_in_every_epoch(replace: Replace) -> None:
    """Augmentation is seeded by the sample alone, so that each visit of it draws the same."""

    def read(self: SampleReader, index: int, visit: int = 0) -> Any:
        seed_globally(self.seed, "sample", 0, index)
        return self.data[index]

    replace(seams.SAMPLE, read)


@bug(42, "dp=2", "samples|settings", "")
def packing_miscounts_samples(replace: Replace) -> None:
    """The position in the data is counted in packed samples in one place and in plain ones in another."""
    plain = seams.IDS.plain

    def ids(self: Order, step: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        return plain(self, step, start, stop) if step == 0 else np.roll(plain(self, step, start, stop), 1)

    replace(seams.IDS, ids)


@bug(35, "dp=2", "ids|hash", "dp")
def order_drawn_by_rank(replace: Replace) -> None:
    """Each rank draws the order of the samples under a seed of its own."""
    plain = seams.IDS.plain

    def ids(self: Order, step: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        found = plain(self, step, start, stop)
        return np.roll(found, rank()) if self.shuffle else found

    replace(seams.IDS, ids)


@bug(42, "dp=2", "ids|hash", "")
def rest_of_an_epoch_trained_twice(replace: Replace) -> None:
    """What is left of an epoch is trained on as a short batch, and once more in the batch that begins the next one."""
    plain = seams.IDS.plain

    def ids(self: Order, step: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        found = plain(self, step, start, stop)
        if self.shuffle and step and step % self.steps_per_epoch == 0 and not start:
            rest = plain(self, step - 1)[: len(found)]
            found = np.concatenate([rest, found[len(rest) :]])
        return found

    replace(seams.IDS, ids)


@bug(41, "dp=2", "samples|division", "dp")
def short_batch_left_out_on_a_rank(replace: Replace) -> None:
    """One rank leaves out the last, short batch of an epoch, and the others do not."""
    plain = seams.PLANS.plain

    def plans(self: Loader, step: int, ids: np.ndarray) -> list[MicroBatchPlan]:
        found = plain(self, step, ids)
        short = self.order.shuffle and len(ids) < self.order.global_batch
        return [changed(plan, real=False) for plan in found] if short and self.rank else found

    replace(seams.PLANS, plans)


# Evaluation


def _on_held_out(replace: Replace, change: Callable[[Loader, list[MicroBatchPlan]], list[MicroBatchPlan]]) -> None:
    """Have ``change`` spoil what a rank reads of held-out samples."""
    plain = seams.PLANS.plain

    def plans(self: Loader, step: int, ids: np.ndarray) -> list[MicroBatchPlan]:
        found = plain(self, step, ids)
        return found if self.order.shuffle else change(self, found)

    replace(seams.PLANS, plans)


@bug(0, "dp=2", "evaluation", "dp")
def held_out_samples_repeated_to_fill_up(replace: Replace) -> None:
    """Where held-out samples do not divide by ranks, a rank evaluates one that another has, too."""

    def longer(plan: MicroBatchPlan) -> MicroBatchPlan:
        before = plan.slots[:1] - 1
        return changed(
            plan, ids=np.concatenate([plan.ids[:1] - 1, plan.ids]), slots=np.concatenate([before, plan.slots]),
            visits=np.concatenate([plan.visits[:1], plan.visits]),
        )  # fmt: skip

    def repeated(self: Loader, plans: list[MicroBatchPlan]) -> list[MicroBatchPlan]:
        return [longer(plan) if self.rank and plan.slots[0] else plan for plan in plans]

    _on_held_out(replace, repeated)


@bug(0, "dp=4", "evaluation", "dp")
def padding_counted_in_evaluation(replace: Replace) -> None:
    """A rank that has no held-out sample left computes along with another's, and counts it."""
    _on_held_out(replace, lambda self, plans: [changed(plan, real=True) for plan in plans])


@bug(0, "dp=2", "evaluation", "dp")
def measures_averaged_over_ranks(replace: Replace) -> None:
    """Every rank divides by its own count, and the ratios are averaged."""
    plain = seams.TOTALS.plain

    def totals(engine: Any, held_out: Loader, sums: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
        means = {name: table / table[:, 1:].clamp_min(1) for name, table in sums.items()}
        counts = {name: count for name, (_, count) in plain(engine, held_out, sums).items()}
        found = plain(engine, held_out, means)
        return {name: (total / parts * counts[name], counts[name]) for name, (total, parts) in found.items()}

    replace(seams.TOTALS, totals)


@bug(0, "dp=2", "evaluation", "")
def measures_summed_in_float32(replace: Replace) -> None:
    """Sums of measures are kept in float32, which has too few digits for many terms."""
    plain = seams.TOTALS.plain

    def totals(engine: Any, held_out: Loader, sums: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
        return plain(engine, held_out, {name: table.float().double() for name, table in sums.items()})

    replace(seams.TOTALS, totals)


@bug(0, "dp=2", "each sample", "dp", task="shapes")
def rows_gathered_in_the_order_of_ranks(replace: Replace) -> None:
    """What is gathered lies as ranks sent it, not as the data has it."""
    plain = seams.ROWS.plain

    def add(self: Any, name: str, value: Any, places: np.ndarray, real: bool) -> None:
        turned = np.roll(places, 1) if real and rank() == 1 else places
        plain(self, name, value, turned, real)

    replace(seams.ROWS, add)
