"""Batch-norm over the ranks equals torch's over the whole batch: outputs, gradients and running statistics."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from phalanx import WrongUse
from phalanx.parallel.axes.batchnorm import spread_batchnorm
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.traffic import Traffic
from phalanx.parallel.randomness.draws import Moment
from tests.ranks import Ranks

SIZES = (3, 0, 2)
"""Samples by rank; rank 1 has none and stands in with another's."""


def batch() -> torch.Tensor:
    return torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 5 + 100


def layer(**options: object) -> nn.BatchNorm1d:
    made = nn.BatchNorm1d(4, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.linspace(0.5, 2, 4))
    return made


def one_rank(options: dict[str, object]) -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    start = sum(SIZES[:rank])
    real = SIZES[rank] > 0
    x = (batch()[start : start + SIZES[rank]] if real else batch()[:1]).requires_grad_()
    module, moment = layer(**options), Moment(real=real)
    spread_batchnorm(module, Communicator(dist.group.WORLD, Traffic()), 3, moment)
    for recomputing in (False, True):  # a second look at the same batch must leave the statistics alone
        moment.recomputing = recomputing
        out = module(x)
    (out.pow(3).sum() * real).backward()
    module.eval()
    found = {"out": out[: SIZES[rank]], "grad": x.grad[: SIZES[rank]], "eval": module(x)[: SIZES[rank]]}
    found |= {f"grad of {name}": p.grad for name, p in module.named_parameters()} | dict(module.named_buffers())
    if not real:
        assert not x.grad.any(), "a stand-in has a gradient"
    return {name: tensor.detach() for name, tensor in found.items()}


@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}], ids=str
)
def test_over_ranks_as_over_one(ranks: Ranks, options: dict[str, object]) -> None:
    x, module = batch().requires_grad_(), layer(**options)
    out = module(x)
    out.pow(3).sum().backward()
    module.eval()
    answers = ranks(3, one_rank, options)

    def together(name: str) -> torch.Tensor:
        return torch.cat([answer[name] for answer in answers])

    assert torch.allclose(together("out"), out, rtol=1e-12)
    assert torch.allclose(together("grad"), x.grad, rtol=1e-10, atol=1e-10)
    if options.get("track_running_stats", True):
        assert torch.allclose(together("eval"), module(x), rtol=1e-12)
    for name, parameter in module.named_parameters():
        assert torch.allclose(sum(answer[f"grad of {name}"] for answer in answers), parameter.grad, rtol=1e-10)
    for name, buffer in module.named_buffers():
        for answer in answers:
            assert torch.allclose(answer[name], buffer, rtol=1e-12), name


def test_on_one_rank_a_recomputed_batch_is_not_counted_twice() -> None:
    module, moment = layer(), Moment()
    spread_batchnorm(module, Communicator(None, Traffic()), 1, moment)
    first = module(batch())
    before = module.running_mean.clone(), module.num_batches_tracked.clone()
    moment.recomputing = True
    assert torch.equal(module(batch()), first)
    assert torch.equal(module.running_mean, before[0])
    assert module.num_batches_tracked == before[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_normalised_wide(dtype: torch.dtype) -> None:
    module = nn.BatchNorm2d(4)
    module.weight.data, module.bias.data = module.weight.data.to(dtype), module.bias.data.to(dtype)
    spread_batchnorm(module, Communicator(None, Traffic()), 1, Moment())
    x = (torch.randn(8, 4, 5, 5) * 3 + 10).to(dtype).requires_grad_()
    out = module(x)
    out.float().square().sum().backward()
    assert out.dtype == x.grad.dtype == dtype
    assert out.float().mean().abs() < 0.02
    assert module.running_mean.dtype == torch.float32
    module.eval()
    assert module(x).dtype == dtype


class Own(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def test_a_batch_norm_with_its_own_forward_is_refused() -> None:
    with pytest.raises(WrongUse, match="0 is a batch-norm with a forward of its own"):
        spread_batchnorm(nn.Sequential(Own(4)), None, 1, Moment())
