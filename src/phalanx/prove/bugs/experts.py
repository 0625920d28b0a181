"""Known bugs of mixtures of experts: penalties, tokens on their way, gradients that come back."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from phalanx.prove.bugs import seams
from phalanx.prove.bugs.planting import bug
from phalanx.prove.bugs.seams import Replace


@bug(17, "dp=2", "router|feed_forward", "dp", 2.0, experts=8)
def penalties_scaled_by_dp(replace: Replace) -> None:
    """The penalty for uneven experts is summed over ranks where the loss is averaged: it grows with their number."""
    plain = seams.PENALTY_FACTOR.plain
    size = dist.get_world_size() if dist.is_initialized() else 1
    replace(seams.PENALTY_FACTOR, lambda factor: plain(factor * size))


@bug(17, "fsdp=2", "router|feed_forward", "", 0.0, experts=8)
def penalties_never_flow(replace: Replace) -> None:
    """The penalty for uneven experts is computed, logged, and has no gradient."""
    plain = seams.PENALISED.plain
    replace(seams.PENALISED, lambda x, penalty: plain(x, penalty.detach()))


@bug(18, "fsdp=2,ep=2", "experts|router", "ep", experts=8)
def expert_gradients_doubled(replace: Replace) -> None:
    """What comes back from experts elsewhere sends its gradient twice."""

    def prepare(module: Any) -> None:
        seams.planted_around(module, lambda plain, *given: _doubled(plain(*given)))

    seams.on_experts(replace, prepare)


def _doubled(x: Tensor) -> Tensor:
    """The same values, and twice the gradient."""
    return x + (x - x.detach())


@bug(18, "fsdp=2,ep=2", "router|feed_forward", "ep", experts=8)
def router_detached(replace: Replace) -> None:
    """Tokens come back from their experts weighed by shares that were cut off from the router."""

    def called(module: Any, given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        hidden, chosen, shares = given
        return hidden, chosen, shares.detach()

    seams.on_experts(replace, lambda module: module.register_forward_pre_hook(called))


@bug(18, "fsdp=2,ep=2", "experts|feed_forward", "ep", experts=8)
def expert_shares_ignored(replace: Replace) -> None:
    """Each token takes the mean of what its experts give, however much the router gives to each."""

    def called(module: Any, given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        hidden, chosen, shares = given
        return hidden, chosen, shares * 0 + 1 / chosen.shape[-1]

    seams.on_experts(replace, lambda module: module.register_forward_pre_hook(called))


@bug(0, "fsdp=2,ep=2", "experts|feed_forward", "ep", experts=8)
def tokens_come_back_in_another_order(replace: Replace) -> None:
    """Tokens travel to their experts sorted, and come back to whoever stands there."""

    def prepare(module: Any) -> None:
        seams.planted_around(module, lambda plain, *given: plain(*given).roll(1, 0))

    seams.on_experts(replace, prepare)
