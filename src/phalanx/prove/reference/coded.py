"""Sums in few bits, on one device: what a layout's ``comm`` means, by plain arithmetic on each weight.

Every sender's gradient is rounded, what is lost is owed by it, and the sum is rounded again for all, unless each rank
only needs its own part of it. It shares with the codecs nothing but what their rounding is defined as. Methods that
mean more are in files of their own, `onebit` and `low_rank`.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn, optim

from phalanx.comm import Comm
from phalanx.data.order import Order, share
from phalanx.layout import Layout
from phalanx.parallel.communication.mesh import Grid
from phalanx.parallel.weights.placement import Placement
from phalanx.parallel.weights.weight import Rows

BLOCKS = {"int8": (256, 126.9375), "int4": (128, 6.9375), "weights": (256, 127)}
"""Numbers in a block, and what its largest is before it is rounded to a code."""
OWING = ("int4", "topk", "onebit")
ONCE = ("topk",)
"""Those whose sums are not rounded again."""
GATHERED = {"bf16": "bf16", "int8": "weights", "int4": "weights"}
"""By method: how weights are gathered."""
Slots = tuple[int, int]
State = dict[str, Tensor]
Clip = dict[str, float]


class Plain:
    """What all have in common."""

    def begin(self, step: int, optimizer: optim.Optimizer, trained: dict[str, nn.Parameter]) -> None:
        """Before a step."""

    def update(self, optimizer: optim.Optimizer, trained: dict[str, nn.Parameter], clip: Clip, count: float) -> None:
        """With the gradients that weights have, of which each was multiplied by what ``clip`` says of its name."""
        optimizer.step()


class Coded(Plain):
    """The sums of a layout, of which one device is every rank in turn."""

    def __init__(self, layout: Layout, placement: Placement, batch: int, steps: int) -> None:
        """``batch``: samples of a whole step; ``steps``: of the run."""
        method = Comm.parse(layout.comm)
        assert method is not None
        self.method, self.number, self.layout = method.name, method.number, layout
        self.begins = method.exact_steps(steps)
        """Before this step sums are exact."""
        self.over_shards = layout.coded_axis == "fsdp"
        self.micro_batches = layout.micro_batches(batch)
        self.pieces = {name: list(parts_of(name, placement)) for name in placement.weights}
        """By weight, the indices of each part that a rank holds, in order."""
        self.exact = {name for name in self.pieces if not {"tp", "pp"}.isdisjoint(placement.summed_over(name))}
        """Weights to whose gradient other ranks add too."""
        self.owed: dict[tuple[str, int], Tensor] = {}
        """By weight and sender, in the shape of the weight."""
        self.next_owed: dict[tuple[str, int], Tensor] = {}

    def turns(self, order: Order, ids: np.ndarray) -> list[list[list[Slots]]]:
        """What is summed at a time in a step of these samples: by sender, the slots that its gradient is of."""
        layout, ranks = self.layout, self.layout.batch_ranks
        number, tokens = order.micro_batches(len(ids), self.micro_batches), order.tokens(ids)
        ranges = [share(len(ids), number, ranks, rank, tokens) for rank in range(ranks)]
        if self.over_shards and layout.sums_each_micro_batch:
            return [[[own[number]] for own in ranges] for number in range(len(ranges[0]))]
        senders = layout.fsdp if self.over_shards else layout.dp
        each = layout.batch_ranks // senders
        return [[[one for own in ranges[n * each : (n + 1) * each] for one in own] for n in range(senders)]]

    def sum(self, gradients: list[State]) -> State:
        """Of what each sender has, by weight."""
        return {name: self.sum_of(name, [own[name] for own in gradients]) for name in gradients[0]}

    def sum_of(self, name: str, gradients: list[Tensor]) -> Tensor:
        if name in self.exact:
            return torch.stack(gradients).sum(0)
        said = [self._said(name, sender, gradient) for sender, gradient in enumerate(gradients)]
        total = torch.stack(said).sum(0)
        return total if self.over_shards or self.method in ONCE else self._said(name, len(gradients), total)

    def _said(self, name: str, sender: int, numbers: Tensor) -> Tensor:
        """What one sender says of a tensor, and of what it owes of it; the last one has the sum."""
        key = name, sender
        numbers = numbers + self.next_owed.get(key, self.owed.get(key, torch.zeros_like(numbers)))
        said = self.rounded(self.method, name, numbers)
        if self.method in OWING:
            self.next_owed[key] = numbers - said
        return said

    def rounded(self, method: str, name: str, numbers: Tensor) -> Tensor:
        found, flat = torch.empty_like(numbers), numbers.flatten()
        for indices in self.pieces[name]:
            found.view(-1)[indices] = rounded(method, flat[indices], self.number)
        return found

    def end_step(self, counts: bool, without: Set[str]) -> None:
        """Owe what the step has left, if it counts; of weights that it does not update, what was owed before."""
        left = {key: value for key, value in self.next_owed.items() if key[0] not in without}
        self.owed = self.owed | left if counts else self.owed
        self.next_owed = {}

    def gathered(self, weights: State) -> State:
        """Weights as ranks compute with them."""
        if not self.over_shards:
            return weights
        whole = dict(weights)
        for name in self.pieces:
            if weights[name].is_floating_point():
                whole[name] = self.rounded(GATHERED[self.method], name, weights[name])
        return whole

    @contextmanager
    def computing(self, parameters: dict[str, nn.Parameter]) -> Iterator[None]:
        """While this lasts, weights are as ranks compute with them."""
        exact = {name: weight.detach().clone() for name, weight in parameters.items()}
        for name, value in self.gathered(exact).items():
            parameters[name].data.copy_(value)
        yield
        for name, value in exact.items():
            parameters[name].data.copy_(value)


def rounded(method: str, numbers: Tensor, percent: float = 0.0) -> Tensor:
    """Flat numbers as they are after a codec's round trip."""
    if method == "topk":
        return torch.cat([*(_largest(block, percent) for block in numbers.split(1024)), numbers[:0]])
    if method == "bf16":
        return numbers.to(torch.bfloat16).to(numbers.dtype)
    if method == "onebit":
        means = [(block, block.abs().mean()) for block in numbers.split(1024) if len(block)]
        return torch.cat([*(torch.where(block < 0, -mean, mean) for block, mean in means), numbers[:0]])
    size, most = BLOCKS[method]
    found = []
    for block in numbers.split(size) if len(numbers) else ():  # a rank may own no row of a weight
        largest = block.abs().max()
        if not largest.isfinite():
            found.append(torch.full_like(block, torch.nan))
        elif largest == 0:
            found.append(block)
        else:
            found.append((block * (most / largest)).round() * (largest / most))
    return torch.cat([*found, numbers[:0]])


def _largest(block: Tensor, percent: float) -> Tensor:
    """A block of up to 1024 numbers with nothing but the largest of them."""
    count = min(max(1, round(1024 * percent / 100)), len(block))
    order = block.abs().argsort(descending=True, stable=True)
    return block.index_fill(0, order[count:], 0)


def parts_of(name: str, placement: Placement) -> Iterator[Tensor]:
    """The indices into a flat weight of each part of it that is a rank's own."""
    for part, ranks in parts(name, placement):
        for rank in range(ranks):
            rows = Rows.of(part.shape, ranks, rank)
            yield part.reshape(-1, *part.shape[1:])[rows.first : rows.last].flatten() if part.ndim else part.view(1)


def parts(name: str, placement: Placement) -> Iterator[tuple[Tensor, int]]:
    """The indices into a flat weight of each part that an axis has cut, and how many ranks share its rows."""
    one, layout = placement.weights[name], placement.layout
    whole, cut = torch.arange(one.shape.numel()).view(one.shape), placement.plan.cuts.get(name)
    ranks = Grid(layout, 0).size(*one.policy.axes) if one.policy.axes else 1
    for part in [whole] if cut is None else [cut.take(whole, index) for index in range(len(cut.spans))]:
        yield part, ranks
