"""``activations`` on one device: what ranks send is rounded, and so are gradients on their way back.

The stream is rounded where a stage of the layout begins; a token for each expert that it goes to, and what each of them
makes of it. A container of ``tp`` is computed for each rank, with that rank's features alone let through to its rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.comm import EXACT
from phalanx.data.order import Order, parts, share
from phalanx.layout import Layout
from phalanx.parallel.axes.cuts import Plan
from phalanx.parallel.axes.expert import ExpertCalls
from phalanx.parallel.axes.heads import Span
from phalanx.parallel.forward.calls import first_tensor, with_stream
from phalanx.parallel.forward.fp8 import product
from phalanx.parallel.forward.wrapper import Around, Forward, Instead, wrap
from phalanx.parallel.randomness.draws import Randomness
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.parallel.weights.placement import Placement
from phalanx.prove.reference.attention import AttentionOfRanks
from phalanx.prove.reference.rounded import as_sent
from phalanx.task import Task


def round_activations(task: Task, layout: Layout, model: nn.Module, randomness: Randomness) -> None:
    """Have a model's blocks and experts take what ranks of the layout receive."""
    if layout.activations == EXACT:
        return
    described = Blueprint(task.model, task.seed).model
    placement = Placement.of(described, task.anatomy(described), layout)
    for blocks in placement.stages.blocks[1:] if placement.stages is not None else ():
        wrap(model.get_submodule(blocks[0]), Around("round", _block, layout.activations))
    for name in placement.anatomy.experts if layout.ep > 1 else ():
        wrap(model.get_submodule(name), Around("round", _experts, ExpertCalls(model, name), layout.activations))
    if layout.tp > 1:
        _Containers(placement.plan, layout, model, randomness)
    if layout.cp > 1:
        AttentionOfRanks(placement, model, randomness)


def _block(forward: Forward, kind: str, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = with_stream(args, kwargs, as_sent(first_tensor(args, kwargs), kind))
    return forward(*args, **kwargs)


def _experts(forward: Forward, calls: ExpertCalls, kind: str, *args: Any, **kwargs: Any) -> Tensor:
    """Each token's way to each of its experts, by itself."""
    call = calls.read(args, kwargs)
    if call.chosen is None or call.shares is None:
        return as_sent(forward(as_sent(call.rows, kind), *([call.counts] if call.told else [])), kind)
    token, choice = (call.chosen < calls.experts).nonzero(as_tuple=True)
    rows = as_sent(call.rows[token], kind)
    done = forward(rows, call.chosen[token, choice][:, None], rows.new_ones(len(rows), 1))
    weighted = as_sent(done, kind) * call.shares[token, choice][:, None].to(done.dtype)
    return torch.zeros_like(call.rows).index_add(0, token, weighted)


class _Containers:
    """Containers as ranks of ``tp`` compute them, one rank after another."""

    def __init__(self, plan: Plan, layout: Layout, model: nn.Module, randomness: Randomness) -> None:
        self.ranks, self.kind, self.randomness = layout.tp, layout.activations, randomness
        self.by_time, self.rank = plan.sequence_parallel, 0
        self.inputs: list[Tensor] = []
        """Of columns in the container that computes just now, on this rank."""
        self.entered: list[list[Tensor]] = []
        """What columns get instead, on each rank."""
        self.calls, self.parts = 0, defaultdict[int, list[Tensor]](list)
        """By call of a row: what ranks have of its output."""
        divided = [name for name, container in plan.containers.items() if not container.gathered]
        for name in divided:
            wrap(model.get_submodule(name), Around("each rank's part", self._container), inside=True)
        for row in plan.rows:
            if any(row.startswith(f"{name}.") for name in divided):
                module = model.get_submodule(row)
                wrap(module, Instead("a sum", self._row, module, plan.cuts[f"{row}.weight"].spans), inside=True)
        for column, name in plan.columns.items():
            if name in divided and not self.by_time:
                wrap(model.get_submodule(column), Around("a rank's input", self._column), inside=True)

    def _container(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        whole, calls = first_tensor(args, kwargs), self.randomness.calls
        self.entered.clear()
        self.parts.clear()
        for rank in range(self.ranks):  # what is made of the first ones' parts alone is used by nobody
            self.rank, self.calls = rank, 0
            self.inputs.clear()
            own = as_sent(whole, self.kind) if self.by_time else whole
            given, also = with_stream(args, kwargs, own)
            with self.randomness.again(calls) if rank else nullcontext():
                output = forward(*given, **also)
        return output

    def _column(self, forward: Forward, x: Tensor, *rest: Any) -> Tensor:
        """All ranks have the same input: each has a term of its gradient, and their sum is rounded too."""
        if not self.inputs or self.inputs[-1] is not x:
            self.inputs.append(x)
        if len(self.inputs) > len(self.entered):
            whole = as_sent(x, self.kind, forward=False)
            self.entered.append([as_sent(whole, self.kind, forward=False) for _ in range(self.ranks)])
        return forward(self.entered[len(self.inputs) - 1][self.rank], *rest)

    def _row(self, module: Any, spans: Sequence[tuple[Span, ...]], x: Tensor) -> Tensor:
        own = torch.zeros(x.shape[-1], dtype=torch.bool, device=x.device)
        for start, stop in spans[self.rank]:
            own[start:stop] = True
        parts = self.parts[self.calls]
        self.calls += 1
        parts.append(as_sent(product(module, x.masked_fill(~own, 0)), self.kind, backward=self.by_time))
        total = torch.stack(parts).sum(0)
        if not self.by_time:
            total = as_sent(total, self.kind, backward=False)
        return total if module.bias is None else total + module.bias


def chunked(layout: Layout) -> bool:
    """Whether it matters how long samples are that are computed with a sample: ranks have chunks of that length."""
    return layout.activations != EXACT and layout.cp > 1 and layout.cp_kind == "gather"


def shares(layout: Layout, order: Order, ids: np.ndarray) -> list[tuple[int, int]]:
    """The slots that are computed together under a layout, of a step with these samples."""
    slots, tokens = len(ids), order.tokens(ids)
    if layout.exact:
        return parts(0, slots, layout.exact, tokens)
    ranks, number = layout.batch_ranks, order.micro_batches(slots, layout.micro_batches(order.global_batch))
    return [own for rank in range(ranks) for own in share(slots, number, ranks, rank, tokens)]


def rounding(layout: Layout) -> str:
    """What of a layout rounds, or has sites train by themselves, in its own words."""
    sends = layout.pp * layout.ep * layout.tp * layout.cp > 1
    narrow = f"activations={layout.activations}" if layout.activations != EXACT and sends else ""
    return ",".join(filter(None, [f"comm={layout.comm}" if layout.coded_axis or layout.local else "", narrow]))
