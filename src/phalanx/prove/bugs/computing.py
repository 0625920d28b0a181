"""Known bugs of distributed training, each in a few lines, to be planted: `prove --inject NAME` shows it caught.

Every one has been made by somebody, and most said nothing. Each function plants one into the process that calls it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from phalanx.losses import Sequence
from phalanx.models import experts
from phalanx.parallel import spread
from phalanx.parallel.axes import batchnorm, heads
from phalanx.parallel.axes.context import ContextParallel
from phalanx.parallel.axes.expert import ExpertParallel
from phalanx.parallel.axes.pipeline import Pipeline
from phalanx.parallel.axes.tensor import TensorParallel
from phalanx.parallel.blocks import boundary
from phalanx.parallel.communication import collectives, differentiable
from phalanx.parallel.communication.collectives import Pending
from phalanx.parallel.randomness.draws import Randomness
from phalanx.parallel.spread import Spread
from phalanx.parallel.weights.bucket import Bucket, Weight
from phalanx.parallel.weights.holding import Holding
from phalanx.parallel.weights.replicate import Reduction
from phalanx.prove.bugs import around, resume
from phalanx.prove.bugs.planting import BUGS, COUNT, NORM, Replace, agreeing, bug, rank

__all__ = ["BUGS", "around", "resume"]


def _doubled(x: Tensor) -> Tensor:
    """The same values, and twice the gradient."""
    return x + (x - x.detach())


# Gradients


@bug(1, "tp=2", "norm", "tp")
def norms_not_summed_over_tp(replace: Replace) -> None:
    """Under sequence parallelism each rank sees some tokens, and gradients of norms are left as they are there."""
    plain = Holding.adding
    replace(Holding, "adding", lambda self, name: plain(self, name)[:0] or [self.mesh.index("tp")])


@bug(2, "tp=4", "k_proj|v_proj", "tp")
def shared_keys_not_summed_over_tp(replace: Replace) -> None:
    """Key-value heads that several ranks of tp hold get a part of their gradient on each, which is not summed."""
    plain = Holding.adding

    def adding(self: Holding, name: str) -> list[int]:
        return [self.mesh.index("tp")] if "k_proj" in name or "v_proj" in name else plain(self, name)

    replace(Holding, "adding", adding)


@bug(3, "dp=2", "count", "dp")
def loss_by_local_count(replace: Replace) -> None:
    """Every rank divides by the tokens of its own samples, which are not as many as another's."""

    def change(own: Tensor, agreed: Tensor) -> None:
        agreed[COUNT] = own[COUNT] * dist.get_world_size()

    agreeing(replace, change)


@bug(4, "dp=2", "gradients", "micro-batches", 3.0)
def accumulation_not_divided(replace: Replace) -> None:
    """Gradients of micro-batches are summed as if each were a batch of its own."""
    actions, backward = Spread.actions, Spread.backward

    def counted(self: Any, micro_batches: int) -> Any:
        self.micro_batches = micro_batches
        return actions(self, micro_batches)

    replace(Spread, "actions", counted)
    replace(
        Spread, "backward", lambda self, action, factor, last: backward(self, action, factor * self.micro_batches, last)
    )


@bug(5, "pp=2", "gradients", "pp", 1 / 3)
def pipeline_divides_by_micro_batches(replace: Replace) -> None:
    """A pipeline's schedule divides gradients by the number of micro-batches, and the step by the count again."""
    start, backward = Pipeline.start, Pipeline.backward

    def counted(self: Any, micro_batches: Any, actions: Any) -> None:
        self.micro_batches = len(micro_batches)
        start(self, micro_batches, actions)

    replace(Pipeline, "start", counted)
    replace(
        Pipeline, "backward", lambda self, part, act, factor: backward(self, part, act, factor / self.micro_batches)
    )


@bug(8, "pp=2", "embedding.weight", "pp", tied=True)
def tied_embedding_not_summed_over_pp(replace: Replace) -> None:
    """The first and the last stage hold the same embedding, and each keeps its own gradient of it."""
    replace(Holding, "complete", lambda self, gradients, like: None)


@bug(9, "cp=2", "gradients", "cp", 1 / 2)
def cp_scales_loss_twice(replace: Replace) -> None:
    """The loss is divided by cp where each rank has a part of it, and once more where gradients are averaged."""
    plain = Spread.backward
    replace(Spread, "backward", lambda self, action, factor, last: plain(self, action, factor / self.layout.cp, last))


@bug(9, "cp=2", "loss", "cp")
def cp_labels_roll_within_chunks(replace: Replace) -> None:
    """Labels are shifted within a rank's chunk, so the last token of one gets its first token's label."""
    plain = ContextParallel.share_loss

    def share_loss(self: Any, output: Any) -> None:
        plain(self, output)
        places = output.sequence.own.keywords["index"]
        shifted = torch.cat([places[:-1], places[:1]])

        def own(x: Tensor) -> Tensor:
            return x.index_select(1, places if x.is_floating_point() else shifted)

        output.sequence = Sequence(own, output.sequence.add_up)

    replace(ContextParallel, "share_loss", share_loss)


@bug(10, "cp=2", "gradients", "cp")
def cp_attention_keeps_own_keys_gradient(replace: Replace) -> None:
    """Attention gathers keys and values forward, and backward keeps what this rank's queries gave to its own keys."""

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return differentiable._own(gradient, ctx.dim, ctx.group), None, None, None, None

    replace(differentiable._Gather, "backward", staticmethod(backward))


@bug(12, "fsdp=2", "norm", "fsdp")
def clip_by_local_norm(replace: Replace) -> None:
    """Every rank clips by the norm of the gradients that it holds."""

    def change(own: Tensor, agreed: Tensor) -> None:
        agreed[NORM] = own[NORM]

    agreeing(replace, change)


@bug(0, "tp=2", "norm", "tp")
def norm_counts_replicas_twice(replace: Replace) -> None:
    """Weights that all ranks of tp hold alike are counted by each of them in the norm of the gradient."""
    replace(Holding, "counts", lambda self, name: True)


@bug(14, "dp=2", "all-reduce over dp", "dp")
def replicas_never_speak(replace: Replace) -> None:
    """Gradients are not summed over replicas at all: each trains alone."""
    replace(Reduction, "_sum_over_replicas", lambda self, bucket: None)


@bug(14, "dp=2", "gradients", "dp")
def sum_goes_to_a_copy(replace: Replace) -> None:
    """Gradients are summed over replicas in a contiguous copy, which is then thrown away."""

    def summed(self: Any, bucket: Any) -> None:
        collectives.all_reduce(bucket.owned.clone(), self.replicas).wait()

    replace(Reduction, "_sum_over_replicas", summed)


@bug(14, "cp=2", "gradients", "cp")
def gradients_summed_without_cp(replace: Replace) -> None:
    """Gradients are reduced over the data-parallel ranks alone; those of cp hold parts of them too."""
    plain = collectives.reduce_scatter

    def reduce_scatter(output: Tensor, parts: Tensor, group: Any, *how: Any, **also: Any) -> Pending:
        own = parts[group.rank()].clone()
        plain(output, parts, group, *how, **also).wait()
        if group.group_desc == "fsdpxcp":
            output.copy_(own)
        return Pending(())

    replace(collectives, "reduce_scatter", reduce_scatter)


@bug(17, "dp=2", "router|feed_forward", "dp", 2.0, experts=8)
def penalties_scaled_by_dp(replace: Replace) -> None:
    """The penalty for uneven experts is summed over ranks where the loss is averaged: it grows with their number."""
    plain = spread.penalty_factor
    size = dist.get_world_size() if dist.is_initialized() else 1
    replace(spread, "penalty_factor", lambda factor: plain(factor * size))


@bug(17, "fsdp=2", "router|feed_forward", "", 0.0, experts=8)
def penalties_never_flow(replace: Replace) -> None:
    """The penalty for uneven experts is computed, logged, and has no gradient."""
    plain = experts.penalised
    replace(experts, "penalised", lambda x, penalty: plain(x, penalty.detach()))


@bug(18, "fsdp=2,ep=2", "experts|router", "ep", experts=8)
def expert_gradients_doubled(replace: Replace) -> None:
    """What comes back from experts elsewhere sends its gradient twice."""
    plain = ExpertParallel._experts

    def run(self: Any, forward: Any, *args: Any) -> Tensor:
        return plain(self, lambda *given: _doubled(forward(*given)), *args)

    replace(ExpertParallel, "_experts", run)


@bug(18, "fsdp=2,ep=2", "router|feed_forward", "ep", experts=8)
def router_detached(replace: Replace) -> None:
    """Tokens come back from their experts weighed by shares that were cut off from the router."""
    plain = ExpertParallel._experts

    def run(self: Any, forward: Any, count: int, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        return plain(self, forward, count, hidden, chosen, shares.detach())

    replace(ExpertParallel, "_experts", run)


@bug(0, "dp=2", "gradients", "micro-batches")
def last_micro_batch_left_out(replace: Replace) -> None:
    """What the last micro-batch's backward makes is not added to what is summed."""
    plain, start = Bucket.collect, Reduction.start_backward

    def collect(self: Any, weight: Weight) -> None:
        if self.filled and weight.name in self.filled and _last[0]:
            weight.full.grad = None
        else:
            plain(self, weight)

    _last = [False]

    def start_backward(self: Any, last: bool, *args: Any, **kwargs: Any) -> None:
        _last[0] = last
        start(self, last, *args, **kwargs)

    replace(Bucket, "collect", collect)
    replace(Reduction, "start_backward", start_backward)


@bug(0, "fsdp=2", "gradients", "fsdp")
def gradients_summed_in_bfloat16(replace: Replace) -> None:
    """Gradients travel in a lower precision than they are kept in."""
    plain = collectives.reduce_scatter

    def reduce_scatter(output: Tensor, parts: Tensor, group: Any, *how: Any, **also: Any) -> Pending:
        return plain(output, parts.copy_(parts.to(torch.bfloat16)), group, *how, **also)

    replace(collectives, "reduce_scatter", reduce_scatter)


@bug(69, "dp=2", "gradients", "dp")
def a_device_miscalculates(replace: Replace) -> None:
    """One device gets one element of one gradient wrong, by a millionth."""
    plain = Bucket.collect

    def collect(self: Any, weight: Weight) -> None:
        if rank() == 1 and weight.name.endswith("blocks.1.attention.o_proj.weight"):
            assert weight.full.grad is not None
            weight.full.grad.view(-1)[5] *= 1 + 1e-6
        plain(self, weight)

    replace(Bucket, "collect", collect)


# Forward


@bug(15, "tp=2", "o_proj|down_proj", "tp", 2.0, bias=True)
def row_bias_added_on_every_rank(replace: Replace) -> None:
    """A linear cut by its input adds its bias on each rank, before the sum over ranks."""

    def row(self: Any, module: Any, inside: str, x: Tensor) -> Tensor:
        product = F.linear(x, module.weight, module.bias)
        self._turn_outside()
        return differentiable.scatter(product, 1, self.group, alike=False)

    replace(TensorParallel, "_row", row)


@bug(0, "tp=2", "embedding", "tp")
def vocabulary_masks_off_by_one(replace: Replace) -> None:
    """A rank's part of the vocabulary leaves out its first ids, which then belong to nobody."""
    plain = TensorParallel._embedding

    def embedding(self: Any, module: Any, tokens: Tensor) -> Tensor:
        start, _ = differentiable.run(module.num_embeddings, self.group.size(), self.group.rank())
        lost = (tokens >= start) & (tokens < start + 8)
        return plain(self, module, tokens.where(~lost, (start + 8) % module.num_embeddings)) * ~lost.unsqueeze(-1)

    replace(TensorParallel, "_embedding", embedding)


@bug(0, "fsdp=2,ep=2", "experts|feed_forward", "ep", experts=8)
def tokens_come_back_in_another_order(replace: Replace) -> None:
    """Tokens travel to their experts sorted, and come back to whoever stands there."""

    def exchange_rows(x: Tensor, out: Any, back: Any, group: Any) -> Tensor:
        came = differentiable.exchange_rows(x, out, back, group)
        return came.flip(0) if sum(back) < sum(out) or list(back) != list(out) else came.roll(1, 0)

    from phalanx.parallel.axes import expert

    replace(expert, "exchange_rows", exchange_rows)


@bug(20, "tp=2", "draw", "tp", dropout=0.1)
def dropout_repeats_on_tp_ranks(replace: Replace) -> None:
    """Ranks hold different tokens of a sequence, and drop the same places of their own part."""
    replace(Randomness, "_grid", lambda self, inner: inner)


@bug(20, "tp=2", "draw", "tp", dropout=0.1)
def dropout_differs_between_tp_ranks(replace: Replace) -> None:
    """Ranks that compute the same thing drop different elements of it."""
    plain = Randomness.keys
    replace(Randomness, "keys", lambda self: tuple(key + rank() for key in plain(self)))


@bug(0, "cp=2", "attention|blocks.0", "cp")
def positions_count_from_the_chunk(replace: Replace) -> None:
    """Rotary positions begin at 0 on every rank of cp, instead of where its part of the sequence lies."""
    plain = ContextParallel._cut

    def cut(self: Any, hidden: Tensor, x: Tensor) -> Tensor:
        own = plain(self, hidden, x)
        rotary = x.is_floating_point() and x.ndim == 4 and own is not x
        return x.narrow(-2, 0, own.shape[-2]) if rotary else own

    replace(ContextParallel, "_cut", cut)


@bug(21, "tp=2", "weight", "tp")
def tp_parts_drawn_alike(replace: Replace) -> None:
    """Every rank of tp draws its part of a weight under the same seed, so the parts are the same."""

    def part(self: Holding, name: str, whole: Tensor) -> Tensor:
        cut = self.cut(name)
        return cut.take(whole, 0) if cut else whole

    replace(Holding, "part", part)


@bug(26, "dp=2", "norm|stem|shortcut", "dp", task="shapes")
def batch_norm_by_rank(replace: Replace) -> None:
    """Batch-norm takes mean and variance of a rank's own samples."""
    plain = spread.spread_batchnorm
    replace(spread, "spread_batchnorm", lambda model, group, ranks, moment: plain(model, None, 1, moment))


@bug(26, "dp=2", "running|num_batches", "dp", task="shapes")
def running_statistics_by_rank(replace: Replace) -> None:
    """Batch-norm normalises over all samples, and remembers the mean of a rank's own."""
    plain = batchnorm.GlobalBatchNorm._track

    def track(self: Any, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        plain(self, mean * (1 + 0.01 * rank()), variance, count)

    replace(batchnorm.GlobalBatchNorm, "_track", track)


@bug(30, "tp=2", "blocks", "tp")
def part_taken_for_the_whole(replace: Replace) -> None:
    """What is cut over ranks is taken for whole: everybody goes on with copies of its own part."""

    def gather(x: Tensor, dim: int, total: int, group: Any, *, alike: bool) -> Tensor:
        whole = differentiable.gather(x, dim, total, group, alike=alike)
        own = torch.cat([x] * group.size(), dim).narrow(dim, 0, min(total, x.shape[dim] * group.size()))
        return own if alike and dim == 1 and own.shape == whole.shape else whole

    replace(boundary, "gather", gather)


@bug(44, "tp=2", "attention", "tp")
def heads_cut_against_each_other(replace: Replace) -> None:
    """Queries are cut in one order of heads and keys in another, so heads meet strangers."""
    plain = heads.head_spans

    def spans(name: str, *sizes: Any) -> Any:
        found = plain(name, *sizes)
        return found[::-1] if name.endswith("q_proj") else found

    replace(heads, "head_spans", spans)


@bug(70, "dp=2", "feed_forward", "dp")
def not_a_number_on_one_rank(replace: Replace) -> None:
    """One rank computes what is not a number, and in one sum everybody has it."""
    from phalanx.models.transformer import FeedForward

    plain = FeedForward.forward
    replace(FeedForward, "forward", lambda self, x: plain(self, x) * (float("nan") if rank() == 1 else 1.0))
