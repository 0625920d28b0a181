"""Known bugs of forward: linears and embeddings cut over ranks, dropout, initial weights, batch-norm."""

from __future__ import annotations

from typing import Any

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


# Statistics and numbers


@bug(26, "dp=2", "norm|stem|shortcut", "dp", task="shapes")
def batch_norm_by_rank(replace: Replace) -> None:
    """Batch-norm takes mean and variance of a rank's own samples."""
    seams.on_batch_norms(replace, lambda module: None, alone=True)


@bug(26, "dp=2", "running|num_batches", "dp", task="shapes")
def running_statistics_by_rank(replace: Replace) -> None:
    """Batch-norm normalises over all samples, and remembers the mean of a rank's own."""
    seams.on_batch_norms(replace, lambda module: module.running_mean.mul_(1 + 0.05 * rank()))


@bug(70, "dp=2", "feed_forward", "dp")
def not_a_number_on_one_rank(replace: Replace) -> None:
    """One rank computes what is not a number, and in one sum everybody has it."""
    plain = seams.FEED_FORWARD.plain
    replace(seams.FEED_FORWARD, lambda self, x: plain(self, x) * (float("nan") if rank() == 1 else 1.0))
