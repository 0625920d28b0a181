"""A mixture of experts: each token is sent to the few experts that a router likes best for it.

Penalties keep the router in shape: one for loading experts unevenly within a sequence, one for large logits. Both are
sums over a sequence's tokens, so they do not depend on how the job is spread.

Shapes: B batch, T time, D width, E experts, K experts a token goes to, N tokens, H hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from phalanx.losses import penalised


class Router(nn.Linear):
    """Chooses experts for each token, and how much each of them counts.

    With ``capacity``, an expert takes at most that many times its even share of a sequence's tokens, the first ones;
    who comes later goes without it. By default nobody does.
    """

    def __init__(
        self, width: int, experts: int, chosen: int, capacity: float | None, balance: float, flatness: float
    ) -> None:
        super().__init__(width, experts, bias=False)
        self.chosen, self.capacity, self.balance, self.flatness = chosen, capacity, balance, flatness
        self.whole_time: Callable[..., Tensor] = _same
        self.own_time: Callable[[Tensor], Tensor] = _same
        """Where ranks hold some positions of a sequence: all of ``[B, T, ...]``, and this rank's again.

        All of one thing, and then of another: ranks gather them in one order."""

    def forward(self, x_BTD: Tensor, valid_BT1: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """``x``, with the penalties bound to it; the experts of each token; their shares, which add up to 1."""
        logits_BTE = F.linear(x_BTD, self.weight)
        logits_BTE = logits_BTE.to(torch.promote_types(logits_BTE.dtype, torch.float32))
        probabilities_BTE = logits_BTE.softmax(-1)
        shares_BTK, chosen_BTK = probabilities_BTE.topk(self.chosen, -1)
        shares_BTK = shares_BTK / shares_BTK.sum(-1, keepdim=True)
        if self.training or self.capacity is not None:
            counted_BT1 = torch.ones_like(logits_BTE[..., :1]) if valid_BT1 is None else valid_BT1.to(logits_BTE.dtype)
            counted_BT1 = self.whole_time(counted_BT1)
            every_BTK = self.whole_time(chosen_BTK, counted_BT1)
            taken_BTKE = F.one_hot(every_BTK, self.out_features) * counted_BT1.long().unsqueeze(-1)
            if self.training:
                penalty = self._penalty(self.whole_time(logits_BTE, every_BTK), taken_BTKE.sum(2), counted_BT1)
                x_BTD = penalised(x_BTD, penalty)
            if self.capacity is not None:
                fits_BTK = self.own_time(self._fits(taken_BTKE, counted_BT1))
                chosen_BTK = chosen_BTK.where(fits_BTK, self.out_features)
        return x_BTD, chosen_BTK, shares_BTK.to(x_BTD.dtype)

    def _penalty(self, logits_BTE: Tensor, taken_BTE: Tensor, valid_BT1: Tensor) -> Tensor:
        tokens_B1 = valid_BT1.sum(1).clamp_min(1)
        load_BE = taken_BTE.sum(1) / (tokens_B1 * self.chosen)
        liking_BE = (logits_BTE.softmax(-1) * valid_BT1).sum(1) / tokens_B1
        uneven = (self.out_features * (load_BE * liking_BE).sum(-1, keepdim=True) * tokens_B1).sum()
        large = (logits_BTE.logsumexp(-1, keepdim=True).square() * valid_BT1).sum()
        return self.balance * uneven + self.flatness * large

    def _fits(self, taken_BTKE: Tensor, valid_BT1: Tensor) -> Tensor:
        """Whether each choice is among the first that its expert has room for."""
        assert self.capacity is not None
        room_B = torch.ceil(valid_BT1.sum((1, 2)) * (self.capacity * self.chosen / self.out_features))
        so_far = taken_BTKE.flatten(1, 2).cumsum(1).view_as(taken_BTKE)
        over = (taken_BTKE * so_far).sum(-1) > room_B.view(-1, 1, 1)
        return ~over


class Experts(nn.Module):
    """Feed-forwards with their weights stacked, for tokens that have chosen among them."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * hidden, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, hidden))
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.uniform_(weight, -1 / math.sqrt(weight.shape[-1]), 1 / math.sqrt(weight.shape[-1]))

    def forward(self, x_ND: Tensor, chosen_NK: Tensor, shares_NK: Tensor) -> Tensor:
        """A choice of ``num_experts`` chooses nobody. On a GPU in bfloat16 nothing is read back from the device."""
        by_expert, order = chosen_NK.reshape(-1).sort(stable=True)  # those who chose nobody are last
        experts = torch.arange(self.num_experts, device=by_expert.device)
        ends_E = torch.searchsorted(by_expert, experts, right=True)
        anybody = (by_expert < self.num_experts).unsqueeze(1)
        back = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
        rows = _Dispatched.apply(x_ND, chosen_NK.shape[1], order, back, anybody)
        gate, up = grouped_linear(rows, self.gate_up_proj, ends_E).chunk(2, -1)
        out = grouped_linear(F.silu(gate) * up, self.down_proj, ends_E)
        out_NKD = _Returned.apply(out, order, back, anybody).view(*chosen_NK.shape, x_ND.shape[1])
        return (out_NKD * shares_NK.unsqueeze(-1)).sum(1)


class _Dispatched(Function):
    """A row for each choice of each token, by expert. What comes back of a choice of nobody may be anything."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, chosen: int, order: Tensor, back: Tensor, anybody: Tensor) -> Tensor:
        ctx.chosen = chosen
        ctx.save_for_backward(back, anybody)
        return x_ND[order // chosen]

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None, None]:
        back, anybody = ctx.saved_tensors
        slope_NKD = slope.where(anybody, 0)[back].view(len(back) // ctx.chosen, ctx.chosen, slope.shape[1])
        return slope_NKD.sum(1), None, None, None, None


class _Returned(Function):
    """Rows by expert in the order of tokens and their choices again; zeros of a choice of nobody."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor, anybody: Tensor) -> Tensor:
        ctx.save_for_backward(order, anybody)
        return rows.where(anybody, 0)[back]

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None]:
        order, anybody = ctx.saved_tensors
        return slope[order].where(anybody, 0), None, None, None


class MixtureOfExperts(nn.Module):
    """A router and its experts in the place of one feed-forward."""

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        chosen: int,
        capacity: float | None,
        balance: float,
        flatness: float,
    ) -> None:
        super().__init__()
        self.router = Router(width, experts, chosen, capacity, balance, flatness)
        self.experts = Experts(experts, width, hidden)

    def forward(self, x_BTD: Tensor, valid_BT1: Tensor | None = None) -> Tensor:
        x_BTD, chosen_BTK, shares_BTK = self.router(x_BTD, valid_BT1)
        return self.experts(x_BTD.flatten(0, 1), chosen_BTK.flatten(0, 1), shares_BTK.flatten(0, 1)).view_as(x_BTD)


def grouped_linear(x_ND: Tensor, weights_EHD: Tensor, ends_E: Tensor) -> Tensor:
    """Rows up to ``ends[0]`` through the first weight, those up to ``ends[1]`` through the second, and so on.

    What is given for rows beyond the last may be anything.
    """
    aligned = x_ND.shape[-1] % 8 == 0 == weights_EHD.shape[1] % 8
    if x_ND.is_cuda and x_ND.dtype == torch.bfloat16 and aligned:  # one kernel, and the ends stay on the device
        return F.grouped_mm(x_ND, weights_EHD.transpose(1, 2), offs=ends_E.to(torch.int32))
    ends = [0, *ends_E.tolist()]
    parts = [x_ND[begin:end] for begin, end in pairwise(ends)]
    made = [F.linear(part, weight) for part, weight in zip(parts, weights_EHD.unbind(0), strict=True)]
    return torch.cat([*made, x_ND.new_zeros(len(x_ND) - ends[-1], weights_EHD.shape[1])])


def _same(x: Tensor, after: Tensor | None = None) -> Tensor:
    return x
