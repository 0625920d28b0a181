"""Batch-norm over the global batch, as one device would see it, on every backend.

Each micro-batch is normalised by the mean and variance of all ranks' samples together. torch's SyncBatchNorm has no CPU
path and takes a stand-in's samples for real ones, hence this file.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.errors import WrongUse
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.forward.wrapper import Forward, Layer, wrap
from phalanx.parallel.randomness.draws import Moment

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class _Normalise(torch.autograd.Function):
    """``(x - mean) / sqrt(variance + eps)`` with both taken over the group. Also returns mean, variance and count."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Communicator, ranks: int, real: bool, eps: float) -> tuple[Tensor, ...]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        dims = [0, *range(2, x.ndim)]
        count = float(x.numel() // x.shape[1]) if real else 0.0
        own = torch.stack([wide.new_full((x.shape[1],), count), wide.mean(dims), wide.var(dims, correction=0)])
        every = own.new_empty(ranks, *own.shape)
        group.all_gather(every, own).wait()
        counts, means, variances = every.unbind(1)
        total = counts.sum(0)
        mean = (counts * means).sum(0) / total
        variance = (counts * (variances + (means - mean).square())).sum(0) / total
        scale = (variance + eps).rsqrt()
        shape = _channels(x)
        normal = (wide - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(normal, scale, total)
        ctx.group, ctx.real, ctx.dims, ctx.shape, ctx.dtype = group, real, dims, shape, x.dtype
        ctx.mark_non_differentiable(mean, variance, total)
        return normal.to(x.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        normal, scale, total = ctx.saved_tensors
        wide = gradient.to(normal.dtype)
        sums = torch.stack([wide.sum(ctx.dims), (wide * normal).sum(ctx.dims)]) * float(ctx.real)
        ctx.group.all_reduce(sums).wait()
        first, second = (sums / total * float(ctx.real)).unbind(0)  # a stand-in had no part in mean and variance
        back = scale.view(ctx.shape) * (wide - first.view(ctx.shape) - normal * second.view(ctx.shape))
        return back.to(ctx.dtype), None, None, None, None


def _channels(x: Tensor) -> list[int]:
    """The shape in which one value a channel broadcasts over ``x``."""
    return [1, -1, *[1] * (x.ndim - 2)]


class GlobalBatchNorm(Layer):
    """The forward of one batch-norm module over the ranks of a group. A recomputed batch is not counted twice."""

    def __init__(self, name: str, module: Any, group: Communicator, ranks: int, moment: Moment) -> None:
        self.name, self.module, self.group, self.ranks, self.moment = name, module, group, ranks, moment
        self.title = "statistics of the global batch"

    def __call__(self, rest: Forward, x: Tensor) -> Tensor:
        module = self.module
        batch_statistics = module.training or module.running_mean is None
        values = x.numel() // x.shape[1] if x.ndim > 1 and x.shape[1] else 0
        if module.training and self.moment.single and values == len(self.moment.slots):
            raise self._without_variance(self.moment.single)  # it will come to that, and no step is done yet
        narrow = x.dtype in (torch.float16, torch.bfloat16)  # torch's kernels want float32 weights beside such inputs
        if batch_statistics and self.group.alone and values == 1:
            raise self._without_variance()
        if not narrow and (self.group.alone or not batch_statistics):
            return self._on_one_rank(rest, x)
        if batch_statistics:
            normal, mean, variance, count = _Normalise.apply(x, self.group, self.ranks, self.moment.real, module.eps)
            if values == 1 and float(count[0]) == 1:  # then every rank has one value here, and comes to this
                raise self._without_variance()
            if module.training and module.track_running_stats and not self.moment.recomputing:
                self._track(mean, variance, count)
        else:
            scale = (module.running_var + module.eps).rsqrt().view(_channels(x))
            normal = ((x.float() - module.running_mean.view(_channels(x))) * scale).to(x.dtype)
        if module.weight is None:
            return normal
        return normal * module.weight.view(_channels(x)) + module.bias.view(_channels(x))

    def _without_variance(self, why: str = "") -> WrongUse:
        """For one value per channel over all ranks, which torch refuses on one device, too."""
        few = why or (
            "a micro-batch has one value for each. Set a larger micro_batch or global_batch, or last_batch=drop"
            if self.module.training
            else "an evaluation has a batch of one value for each. Give the module track_running_stats=True"
        )
        return WrongUse(f"the batch-norm {self.name} needs more than one value per channel, and {few}.")

    def _on_one_rank(self, rest: Forward, x: Tensor) -> Tensor:
        module = self.module
        if not (self.moment.recomputing and module.training and module.track_running_stats):
            return rest(x)
        unmoved = 0.0
        return F.batch_norm(
            x, module.running_mean, module.running_var, module.weight, module.bias, True, unmoved, module.eps
        )

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        module = self.module
        module.num_batches_tracked += 1
        share = 1 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
        unbiased = variance * (count / (count - 1).clamp_min(1))
        for running, now in ((module.running_mean, mean), (module.running_var, unbiased)):
            running.lerp_(torch.where(count > 0, now.to(running.dtype), running), share)  # a site may have no samples


def spread_batchnorm(model: nn.Module, group: Communicator, ranks: int, moment: Moment) -> None:
    """Give every batch-norm of a model statistics over the group."""
    for name, module in model.named_modules():
        if not isinstance(module, KINDS):
            continue
        if type(module).forward not in {kind.forward for kind in KINDS}:
            raise WrongUse(
                f"{name} is a batch-norm with a forward of its own ({type(module).__name__}), which sees one rank's "
                "samples alone. Use torch's nn.BatchNorm there, or a norm that does not look across the batch."
            )
        wrap(module, GlobalBatchNorm(name, module, group, ranks, moment))
