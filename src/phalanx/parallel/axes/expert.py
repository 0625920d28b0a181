"""Expert parallelism: every rank of ``ep`` holds some experts, and tokens travel to the experts they chose and back.

An experts module holds its weights stacked, experts first. It is called in one of three ways (`ExpertCall`):

    forward(hidden [n, width], chosen [n, k], shares [n, k])   most of Hugging Face's; num_experts chooses nobody
    forward(rows [n, width], counts)                           rows sorted by expert, so many for each
    forward(rows [num_experts * n, width])                     every token once for each expert, sorted by expert

Ranks of ``ep`` have different tokens: they are neighbours within ``fsdp x cp``, and an expert's gradient is summed over
the ranks of ``fsdp x cp`` that hold it, and over ``dp``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.anatomy import Anatomy
from phalanx.errors import WrongUse
from phalanx.parallel.axes.cuts import Cut, Plan
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.differentiable import all_to_all_rows
from phalanx.parallel.communication.narrow import Narrow
from phalanx.parallel.forward.calls import first_tensor
from phalanx.parallel.forward.wrapper import Around, Forward, wrap


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


@dataclass
class ExpertCall:
    """What a call of an experts module gives it: tokens that say what they chose, or rows sorted by expert."""

    rows: Tensor
    chosen: Tensor | None = None
    shares: Tensor | None = None
    counts: Sequence[int] | None = None
    """By expert, how many rows are its own; None where tokens say what they chose."""
    told: bool = False
    """Whether the module is told the counts."""


class ExpertCalls:
    """How one experts module is called, told by its arguments and by how many tokens its parent has."""

    def __init__(self, model: nn.Module, name: str) -> None:
        module: Any = model.get_submodule(name)
        self.name, self.experts, self.tokens = name, module.num_experts, 0
        self.names = list(inspect.signature(module.forward).parameters)
        parent = name.rpartition(".")[0]
        if len(self.names) == 1 and parent:
            wrap(model.get_submodule(parent), Around("count tokens", self._count))

    def _count(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        self.tokens = first_tensor(args, kwargs).shape[:-1].numel()
        return forward(*args, **kwargs)

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExpertCall:
        """What a call gives; one whose meaning is not known is refused."""
        given = [*args, *(kwargs[name] for name in self.names[len(args) :] if name in kwargs)]
        rows, rest = given[0], given[1:]
        if len(rest) == 2 and all(isinstance(x, Tensor) and x.shape[:-1] == rows.shape[:-1] for x in rest):
            return ExpertCall(rows, *rest)
        if len(rest) == 1 and not isinstance(rest[0], Tensor) and len(rest[0]) == self.experts:
            return ExpertCall(rows, counts=rest[0], told=True)
        if not rest and len(rows) == self.experts * self.tokens:
            return ExpertCall(rows, counts=[self.tokens] * self.experts)
        raise WrongUse(
            f"{self.name} is called with {len(given)} arguments, the first of shape {tuple(rows.shape)}, and it cannot "
            "be told which tokens go to which expert. Call it with hidden states, the experts that each token chose "
            "and their shares, or with rows sorted by expert and their counts; or leave ep out."
        )


class ExpertParallel:
    """Makes experts modules work with their experts, for tokens of all ranks."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, group: Communicator, narrow: Narrow) -> None:
        """``narrow``: how tokens are made small on their way, and what experts make of them on its way back."""
        self.group, self.narrow = group, narrow
        for name in anatomy.experts:
            module: Any = model.get_submodule(name)
            calls = ExpertCalls(model, name)
            module.num_experts //= group.size
            wrap(module, Around("experts of all ranks", self._experts, calls))

    def _experts(self, forward: Callable[..., Tensor], calls: ExpertCalls, *args: Any, **kwargs: Any) -> Tensor:
        call = calls.read(args, kwargs)
        if torch.is_grad_enabled() and not call.rows.requires_grad:  # whoever gets no token goes back as the others do
            call.rows = call.rows.detach().requires_grad_()
        if call.counts is not None:
            return self._sorted(forward, call, call.counts)
        assert call.chosen is not None
        assert call.shares is not None
        hidden, each = call.rows, call.chosen.shape[1]
        flat = call.chosen.reshape(-1)
        counts = torch.bincount(flat, minlength=calls.experts + 1)[: calls.experts]
        order = flat.argsort(stable=True)[: int(counts.sum())]  # by expert; those who chose nobody are last
        tokens = order // each
        arrived, taken, back = self._sent(hidden[tokens], counts)
        done = forward(arrived, self._experts_of(taken).unsqueeze(1), arrived.new_ones(len(arrived), 1))
        weighted = back(done) * call.shares.reshape(-1)[order].unsqueeze(1).to(done.dtype)
        return torch.zeros_like(hidden).index_add(0, tokens, weighted)

    def _sorted(self, forward: Callable[..., Tensor], call: ExpertCall, counts: Sequence[int]) -> Tensor:
        """Rows that are sorted by expert go as they are; those that arrive are sorted anew, by rank as they came."""
        arrived, taken, back = self._sent(call.rows, torch.tensor(counts, device=call.rows.device))
        order = self._experts_of(taken).argsort(stable=True)
        told = [taken.sum(0).tolist()] if call.told else []
        done = forward(arrived[order], *told)
        return back(done.new_zeros(done.shape).index_copy(0, order, done))

    def _sent(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """Rows sorted by expert, to where those are.

        Gives what arrives here, how many rows of each rank are for each expert here, and the way back.
        """
        given = counts.view(self.group.size, -1)
        taken = self.group.all_to_all(given)
        out, back = given.sum(1).tolist(), taken.sum(1).tolist()
        arrived = all_to_all_rows(rows, out, back, self.group, self.narrow)

        def returned(done: Tensor) -> Tensor:
            done = done + arrived[:0].sum()  # also where no expert had a token
            return all_to_all_rows(done, back, out, self.group, self.narrow)

        return arrived, taken, returned

    @staticmethod
    def _experts_of(taken: Tensor) -> Tensor:
        """Of rows as they arrived, which of the experts here each is for."""
        ranks, here = taken.shape
        return torch.arange(here, device=taken.device).repeat(ranks).repeat_interleave(taken.reshape(-1))
