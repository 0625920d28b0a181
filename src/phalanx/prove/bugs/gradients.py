"""Known bugs of gradients: sums that are missing, doubled, scaled or rounded, over micro-batches and over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.prove.bugs import seams
from phalanx.prove.bugs.planting import bug, rank
from phalanx.prove.bugs.seams import Replace

# Over tp and pp


@bug(1, "tp=2", "norm", "tp")
def norms_not_summed_over_tp(replace: Replace) -> None:
    """Under sequence parallelism each rank sees some tokens, and gradients of norms are left as they are there."""
    replace(seams.ADDING, lambda self, name: [self.mesh.index("tp")])


@bug(2, "tp=4", "k_proj|v_proj", "tp")
def shared_keys_not_summed_over_tp(replace: Replace) -> None:
    """Key-value heads that several ranks of tp hold get a part of their gradient on each, which is not summed."""
    plain = seams.ADDING.plain

    def adding(self: Any, name: str) -> list[int]:
        return [self.mesh.index("tp")] if "k_proj" in name or "v_proj" in name else plain(self, name)

    replace(seams.ADDING, adding)


@bug(8, "pp=2", "embedding.weight", "pp", tied=True)
def tied_embedding_not_summed_over_pp(replace: Replace) -> None:
    """The first and the last stage hold the same embedding, and each keeps its own gradient of it."""
    replace(seams.COMPLETE, lambda self, gradients, like: None)


@bug(0, "tp=2", "norm", "tp")
def norm_counts_replicas_twice(replace: Replace) -> None:
    """Weights that all ranks of tp hold alike are counted by each of them in the norm of the gradient."""
    replace(seams.COUNTS, lambda self, name: True)


# Over micro-batches, and what they are scaled by


@bug(4, "dp=2", "gradients", "micro-batches", 3.0)
def accumulation_not_divided(replace: Replace) -> None:
    """Gradients of micro-batches are summed as if each were a batch of its own."""
    actions, backward = seams.ACTIONS.plain, seams.BACKWARD.plain

    def counted(self: Any, micro_batches: int) -> Any:
        self.micro_batches = micro_batches
        return actions(self, micro_batches)

    def scaled(self: Any, action: Any, factor: float, last: bool) -> None:
        backward(self, action, factor * self.micro_batches, last)

    replace(seams.ACTIONS, counted)
    replace(seams.BACKWARD, scaled)


@bug(5, "pp=2", "gradients", "pp", 1 / 3)
def pipeline_divides_by_micro_batches(replace: Replace) -> None:
    """A pipeline's schedule divides gradients by the number of micro-batches, and the step by the count again."""
    start, backward = seams.PIPELINE_START.plain, seams.PIPELINE_BACKWARD.plain

    def counted(self: Any, micro_batches: Any, actions: Any) -> None:
        self.micro_batches = len(micro_batches)
        start(self, micro_batches, actions)

    def divided(self: Any, part: Any, action: Any, factor: float) -> None:
        backward(self, part, action, factor / self.micro_batches)

    replace(seams.PIPELINE_START, counted)
    replace(seams.PIPELINE_BACKWARD, divided)


@bug(9, "cp=2", "gradients", "cp", 1 / 2)
def cp_scales_loss_twice(replace: Replace) -> None:
    """The loss is divided by cp where each rank has a part of it, and once more where gradients are averaged."""
    plain = seams.BACKWARD.plain

    def backward(self: Any, action: Any, factor: float, last: bool) -> None:
        plain(self, action, factor / self.layout.cp, last)

    replace(seams.BACKWARD, backward)


@bug(0, "dp=2", "gradients", "micro-batches")
def last_micro_batch_left_out(replace: Replace) -> None:
    """What the last micro-batch's backward makes is not added to what is summed."""
    plain, start = seams.COLLECT.plain, seams.START_BACKWARD.plain
    in_last = [False]

    def collect(self: Any, weight: Any, gradient: Tensor) -> None:
        if self.filled and weight.name in self.filled and in_last[0]:
            weight.full.grad = None
        else:
            plain(self, weight, gradient)

    def start_backward(self: Any, last: bool, *args: Any, **kwargs: Any) -> None:
        in_last[0] = last
        start(self, last, *args, **kwargs)

    replace(seams.COLLECT, collect)
    replace(seams.START_BACKWARD, start_backward)


@bug(0, "dp=2", "gradients", "")
def gradients_kept_after_a_skipped_step(replace: Replace) -> None:
    """A step that is not a number is skipped, and its gradients are added to the next one's."""
    clear, end_step = seams.CLEAR.plain, seams.END_STEP.plain
    skipped: set[int] = set()

    def ended(self: Any, counts: bool, *rest: Any) -> None:
        (skipped.discard if counts else skipped.add)(id(self))
        end_step(self, counts, *rest)

    def cleared(self: Any, as_made: bool) -> None:
        if id(self) not in skipped:
            clear(self, as_made)

    replace(seams.CLEAR, cleared)
    replace(seams.END_STEP, ended)


@bug(0, "dp=2", "norm", "")
def rest_of_a_row_left_out_of_the_norm(replace: Replace) -> None:
    """Squares are summed by rows of 64 elements, and the elements that fill no row are left out."""

    def norm_squared(self: Any) -> Tensor:
        every = [own.flatten() for weight, own in self.each() if self.holding.counts(weight.name)]
        squares = [own[: len(own) // 64 * 64].double().square().sum() for own in every]
        return torch.stack(squares).sum() / self.mesh.size("dp")

    replace(seams.NORM_SQUARED, norm_squared)


@bug(0, "dp=2", "norm", "")
def norm_summed_in_float32(replace: Replace) -> None:
    """The squares of all gradients are summed in float32, whatever they are kept in."""

    def norm_squared(self: Any) -> Tensor:
        squares = [own.float().square().sum() for weight, own in self.each() if self.holding.counts(weight.name)]
        return torch.stack(squares).sum().double() / self.mesh.size("dp")

    replace(seams.NORM_SQUARED, norm_squared)


# Over the ranks that share a batch


@bug(14, "dp=2", "all-reduce over dp", "dp")
def replicas_never_speak(replace: Replace) -> None:
    """Gradients are not summed over replicas at all: each trains alone."""
    replace(seams.SUM_OVER_REPLICAS, lambda self, bucket: None)


@bug(14, "dp=2", "gradients", "dp")
def sum_goes_to_a_copy(replace: Replace) -> None:
    """Gradients are summed over replicas in a contiguous copy, which is then thrown away."""
    plain = seams.SUM_OVER_REPLICAS.plain

    def summed(self: Any, bucket: Any) -> None:
        own, bucket.owned = bucket.owned, bucket.owned.clone()
        plain(self, bucket)
        bucket.owned = own

    replace(seams.SUM_OVER_REPLICAS, summed)


@bug(14, "cp=2", "gradients", "cp")
def gradients_summed_without_cp(replace: Replace) -> None:
    """Gradients are reduced over the data-parallel ranks alone; those of cp hold parts of them too."""

    def keep(output: Tensor, own: Tensor, axes: str) -> None:
        if axes == "fsdpxcp":
            output.copy_(own)

    seams.reduce_scattering(replace, keep=keep)


@bug(0, "fsdp=2", "gradients", "fsdp")
def gradients_summed_in_bfloat16(replace: Replace) -> None:
    """Gradients travel in a lower precision than they are kept in."""
    seams.reduce_scattering(replace, bring=lambda parts: parts.copy_(parts.to(torch.bfloat16)))


@bug(69, "dp=2", "gradients", "dp")
def a_device_miscalculates(replace: Replace) -> None:
    """One device gets one element of one gradient wrong, by a millionth."""
    plain = seams.COLLECT.plain

    def collect(self: Any, weight: Any, gradient: Tensor) -> None:
        if rank() == 1 and weight.name.endswith("blocks.1.attention.o_proj.weight"):
            gradient.view(-1)[5] *= 1 + 1e-6
        plain(self, weight, gradient)

    replace(seams.COLLECT, collect)
