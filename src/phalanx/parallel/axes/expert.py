"""Expert parallelism: every rank of ``ep`` holds some experts, and tokens travel to the experts they chose and back.

An experts module holds its weights stacked, experts first, and is called with tokens, the experts each chose and how
much each counts, as Hugging Face's are: ``forward(hidden [n, width], chosen [n, k], shares [n, k])``. A choice of
``num_experts`` chooses nobody. Ranks of ``ep`` have different tokens: they are neighbours within ``fsdp x cp``, and an
expert's gradient is summed over the ranks of ``fsdp x cp`` that hold it, and over ``dp``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.anatomy import Anatomy
from phalanx.errors import WrongUse
from phalanx.parallel.axes.cuts import Cut, Plan
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.differentiable import all_to_all_rows
from phalanx.parallel.communication.narrow import Narrow
from phalanx.parallel.forward.wrapper import Around, wrap


def cut_experts(plan: Plan, model: nn.Module, anatomy: Anatomy, ranks: int) -> None:
    """Give every rank of ``ep`` its run of the experts."""
    if not anatomy.experts:
        raise WrongUse(
            f"ep={ranks} finds no experts in {type(model).__name__}: no module holds weights stacked by expert and "
            "says num_experts. Name it in Task.anatomy, e.g. Anatomy.of(model, experts='*.experts'), or leave ep out."
        )
    for name in anatomy.experts:
        module: Any = model.get_submodule(name)
        if module.num_experts % ranks:
            works = max(n for n in range(1, ranks + 1) if module.num_experts % n == 0)
            raise WrongUse(
                f"{name} has {module.num_experts} experts, which do not divide by ep={ranks}. "
                f"Use an ep that divides them, such as ep={works}."
            )
        each = module.num_experts // ranks
        spans = tuple(((rank * each, (rank + 1) * each),) for rank in range(ranks))
        for weight, _ in module.named_parameters(prefix=name):
            plan.cuts[weight] = Cut(0, spans, axis="ep")


class ExpertParallel:
    """Makes experts modules work with their experts, for tokens of all ranks."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, group: Communicator, narrow: Narrow) -> None:
        """``narrow``: how tokens are made small on their way, and what experts make of them on its way back."""
        self.group, self.narrow = group, narrow
        for name in anatomy.experts:
            module: Any = model.get_submodule(name)
            experts = module.num_experts
            module.num_experts //= group.size
            wrap(module, Around("experts of all ranks", self._experts, experts))

    def _experts(
        self, forward: Callable[..., Tensor], experts: int, hidden: Tensor, chosen: Tensor, shares: Tensor
    ) -> Tensor:
        ranks, each = self.group.size, chosen.shape[1]
        if torch.is_grad_enabled() and not hidden.requires_grad:
            hidden = hidden.detach().requires_grad_()  # whoever gets no token goes back the same way as the others
        flat = chosen.reshape(-1)
        counts = torch.bincount(flat, minlength=experts + 1)[:experts]
        order = flat.argsort(stable=True)[: int(counts.sum())]  # by expert; those who chose nobody are last
        tokens = order // each
        given = counts.view(ranks, -1)
        taken = self.group.all_to_all(given)
        out, back = given.sum(1).tolist(), taken.sum(1).tolist()
        arrived = all_to_all_rows(hidden[tokens], out, back, self.group, self.narrow)
        local = torch.arange(given.shape[1], device=hidden.device).repeat(ranks).repeat_interleave(taken.reshape(-1))
        done = forward(arrived, local.unsqueeze(1), arrived.new_ones(len(arrived), 1))
        done = done + arrived[:0].sum()  # also where no expert had a token
        returned = all_to_all_rows(done, back, out, self.group, self.narrow)
        weighted = returned * shares.reshape(-1)[order].unsqueeze(1).to(returned.dtype)
        return torch.zeros_like(hidden).index_add(0, tokens, weighted)
