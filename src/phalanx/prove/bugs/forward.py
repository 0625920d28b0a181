"""Known bugs of forward: linears and embeddings cut over ranks, dropout, initial weights, batch-norm."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.prove.bugs import seams
from phalanx.prove.bugs.planting import bug, rank
from phalanx.prove.bugs.seams import Replace

# Weights cut over tp


@bug(15, "tp=2", "o_proj|down_proj", "tp", 2.0, bias=True)
def row_bias_added_on_every_rank(replace: Replace) -> None:
    """A linear cut by its input adds its bias on each rank, before the sum over ranks."""

    def prepare(module: Any, ranks: int) -> None:
        module.register_forward_hook(lambda module, given, output: output + (ranks - 1) * module.bias)

    seams.on_rows(replace, prepare)


@bug(0, "tp=2", "embedding", "tp")
def vocabulary_masks_off_by_one(replace: Replace) -> None:
    """A rank's part of the vocabulary leaves out its first ids, which then belong to nobody."""

    def prepare(module: nn.Embedding, ranks: int) -> None:
        each = -(-module.num_embeddings // ranks)

        def called(module: Any, given: tuple[Tensor], output: Tensor) -> Tensor:
            return output * (given[0] % each >= 8).unsqueeze(-1)

        module.register_forward_hook(called)

    seams.on_embeddings(replace, prepare)


@bug(21, "tp=2", "weight", "tp")
def tp_parts_drawn_alike(replace: Replace) -> None:
    """Every rank of tp draws its part of a weight under the same seed, so the parts are the same."""

    def part(self: Any, name: str, whole: Tensor) -> Tensor:
        cut = self.cut(name)
        return cut.take(whole, 0) if cut else whole

    replace(seams.PART, part)


@bug(30, "tp=2", "blocks", "tp")
def part_taken_for_the_whole(replace: Replace) -> None:
    """What is cut over ranks is taken for whole: everybody goes on with copies of its own part."""

    def copies(x: Tensor, whole: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
        own = torch.cat([x] * ranks, dim).narrow(dim, 0, min(whole.shape[dim], x.shape[dim] * ranks))
        return own if dim == 1 and own.shape == whole.shape else whole

    seams.gathering(replace, seams.STREAM_GATHER, copies, state="invariant")


# Random draws


@bug(20, "tp=2", "draw", "tp", dropout=0.1)
def dropout_repeats_on_tp_ranks(replace: Replace) -> None:
    """Ranks hold different tokens of a sequence, and drop the same places of their own part."""
    replace(seams.DRAW_GRID, lambda self, inner: inner)


@bug(20, "tp=2", "draw", "tp", dropout=0.1)
def dropout_differs_between_tp_ranks(replace: Replace) -> None:
    """Ranks that compute the same thing drop different elements of it."""
    plain = seams.DRAW_KEYS.plain
    replace(seams.DRAW_KEYS, lambda self: tuple(key + rank() for key in plain(self)))


@bug(20, "dp=2", "draw", "", dropout=0.1)
def dropout_repeats_in_every_step(replace: Replace) -> None:
    """A generator is seeded anew in each step, so that the same elements are dropped in all of them."""
    plain = seams.DRAW_KEYS.plain

    def keys(self: Any) -> Any:
        step, self.moment.step = self.moment.step, 0
        try:
            return plain(self)
        finally:
            self.moment.step = step

    replace(seams.DRAW_KEYS, keys)


@bug(20, "dp=2", "draw", "micro-batches", dropout=0.1)
def dropout_repeats_in_every_micro_batch(replace: Replace) -> None:
    """Draws are keyed by the place of a sample in its micro-batch, and not in the global batch."""
    plain = seams.DRAW_KEYS.plain

    def keys(self: Any) -> Any:
        slots, self.moment.slots = self.moment.slots, np.arange(len(self.moment.slots))
        try:
            return plain(self)
        finally:
            self.moment.slots = slots

    replace(seams.DRAW_KEYS, keys)


@bug(20, "dp=2,recompute=full", "gradients", "recompute=full", dropout=0.1)
def recompute_drops_other_elements(replace: Replace) -> None:
    """A block that is computed again for backward draws another dropout mask than it had in forward."""
    plain = seams.DRAW_KEYS.plain
    replace(seams.DRAW_KEYS, lambda self: tuple(key + self.moment.recomputing for key in plain(self)))


# Statistics and numbers


@bug(26, "dp=2", "norm|stem|shortcut", "dp", task="shapes")
def batch_norm_by_rank(replace: Replace) -> None:
    """Batch-norm takes mean and variance of a rank's own samples."""
    seams.on_batch_norms(replace, lambda module: None, alone=True)


@bug(26, "dp=2", "running|num_batches", "dp", task="shapes")
def running_statistics_by_rank(replace: Replace) -> None:
    """Batch-norm normalises over all samples, and remembers the mean of a rank's own."""
    seams.on_batch_norms(replace, lambda module: module.running_mean.mul_(1 + 0.05 * rank()))


@bug(26, "dp=4,micro_batch=1", "norm|stem|shortcut", "dp", task="shapes")
def stand_ins_counted_by_batch_norm(replace: Replace) -> None:
    """Batch-norm counts the samples that only stand in on a rank that has none of its own."""
    seams.on_batch_norms(replace, lambda module: None, padded=True)


@bug(20, "dp=2", "gradients", "", task="phalanx.prove.bugs.tasks:Recomputing")
def checkpoint_draws_anew(replace: Replace) -> None:
    """What torch.utils.checkpoint computes again for backward draws another dropout mask than it had in forward."""
    plain = seams.REPLAYED.plain

    def replayed(self: Any) -> Any:
        self.calls += 100
        try:
            return plain(self)
        finally:
            self.calls -= 100

    replace(seams.REPLAYED, replayed)


@bug(26, "dp=2", "gradients", "dp", task="shapes")
def batch_norm_differentiated_by_rank(replace: Replace) -> None:
    """Batch-norm normalises over all samples, and its backward sums over a rank's own."""
    seams.sums_of_batch_norms_alone(replace)


@bug(26, "dp=2,recompute=full", "running|num_batches", "recompute=full", task="shapes")
def recomputed_batch_counted_again(replace: Replace) -> None:
    """Running statistics are moved once more by each block that is computed again for backward."""
    seams.on_batch_norms(replace, lambda module: None, again=True)


@bug(0, "pp=2", "blocks", "pp")
def a_stage_computes_one_micro_batch_again(replace: Replace) -> None:
    """A buffer for what the stage before sends is not received into again, and keeps the first micro-batch."""
    plain = seams.RECEIVED.plain
    kept: dict[Any, Tensor] = {}

    def received(self: Any, action: Any) -> Tensor:
        stream = plain(self, action)
        if action.kind != "forward":
            return stream
        if not action.micro:
            kept[id(self), action.stage] = stream.detach().clone()
        first = kept[id(self), action.stage]
        return first.clone() if first.shape == stream.shape else stream

    replace(seams.RECEIVED, received)


# Losses over all samples


@bug(0, "dp=2", "total", "dp", task="phalanx.prove.bugs.tasks:Overlap")
def loss_over_a_ranks_samples(replace: Replace) -> None:
    """A loss that needs all samples of a step, a batch Dice, is computed of those that a rank has."""
    plain = seams.TOGETHER.plain

    def together(self: Any, kind: str, parts: Any, like: Tensor) -> tuple[Tensor, Tensor]:
        _, own = plain(self, kind, parts, like)
        return own, own

    replace(seams.TOGETHER, together)


@bug(0, "dp=2", "gradients", "dp", 0.5, task="phalanx.prove.bugs.tasks:Overlap")
def gathered_samples_gradient_averaged(replace: Replace) -> None:
    """What comes back to gathered samples is averaged over ranks, where it must be summed."""
    plain = seams.TOGETHER.plain

    def together(self: Any, kind: str, parts: Any, like: Tensor) -> tuple[Tensor, Tensor]:
        every, own = plain(self, kind, parts, like)
        ranks = self.group.size
        if every.requires_grad:
            every.register_hook(lambda gradient: gradient / ranks)
        return every, own

    replace(seams.TOGETHER, together)


@bug(70, "dp=2", "feed_forward", "dp")
def not_a_number_on_one_rank(replace: Replace) -> None:
    """One rank computes what is not a number, and in one sum everybody has it."""
    plain = seams.FEED_FORWARD.plain
    replace(seams.FEED_FORWARD, lambda self, x: plain(self, x) * (float("nan") if rank() == 1 else 1.0))
