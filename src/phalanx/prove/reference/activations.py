"""``activations`` on one device: what ranks send is rounded, and so are gradients on their way back.

The stream is rounded where a stage of the layout begins; a token for each expert that it goes to, and what each of them
makes of it. What several ranks have a term of is computed for each of them: a container of ``tp`` with that rank's
features alone let through to its rows, attention with gradients of that rank of ``cp``'s queries alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from phalanx.comm import EXACT
from phalanx.data.order import parts, share
from phalanx.layout import Layout
from phalanx.parallel.axes import hugging_face
from phalanx.parallel.axes.attending import Attend, Attending
from phalanx.parallel.axes.cuts import Plan
from phalanx.parallel.axes.heads import Span
from phalanx.parallel.forward.calls import TIME, first_tensor, with_stream
from phalanx.parallel.forward.fp8 import product
from phalanx.parallel.forward.wrapper import Around, Forward, Instead, wrap
from phalanx.parallel.randomness.answers import Answers
from phalanx.parallel.randomness.draws import Randomness
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.parallel.weights.placement import Placement
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
        module: Any = model.get_submodule(name)
        wrap(module, Around("round", _experts, module.num_experts, layout.activations))
    if layout.tp > 1:
        _Containers(placement.plan, layout, model, randomness)
    if layout.cp > 1:
        _Attention(placement, model, randomness)


def _block(forward: Forward, kind: str, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = with_stream(args, kwargs, _Rounded.apply(first_tensor(args, kwargs), kind))
    return forward(*args, **kwargs)


def _experts(forward: Forward, experts: int, kind: str, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Each token's way to each of its experts, by itself."""
    token, choice = (chosen < experts).nonzero(as_tuple=True)
    rows = _Rounded.apply(hidden[token], kind)
    done = forward(rows, chosen[token, choice][:, None], rows.new_ones(len(rows), 1))
    weighted = _Rounded.apply(done, kind) * shares[token, choice][:, None].to(done.dtype)
    return torch.zeros_like(hidden).index_add(0, token, weighted)


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
            own = _Rounded.apply(whole, self.kind) if self.by_time else whole
            given, also = with_stream(args, kwargs, own)
            with self.randomness.again(calls) if rank else nullcontext():
                output = forward(*given, **also)
        return output

    def _column(self, forward: Forward, x: Tensor, *rest: Any) -> Tensor:
        """All ranks have the same input: each has a term of its gradient, and their sum is rounded too."""
        if not self.inputs or self.inputs[-1] is not x:
            self.inputs.append(x)
        if len(self.inputs) > len(self.entered):
            whole = _Rounded.apply(x, self.kind, False, True)
            self.entered.append([_Rounded.apply(whole, self.kind, False, True) for _ in range(self.ranks)])
        return forward(self.entered[len(self.inputs) - 1][self.rank], *rest)

    def _row(self, module: Any, spans: Sequence[tuple[Span, ...]], x: Tensor) -> Tensor:
        own = torch.zeros(x.shape[-1], dtype=torch.bool, device=x.device)
        for start, stop in spans[self.rank]:
            own[start:stop] = True
        parts = self.parts[self.calls]
        self.calls += 1
        parts.append(_Rounded.apply(product(module, x.masked_fill(~own, 0)), self.kind, True, self.by_time))
        total = torch.stack(parts).sum(0)
        if not self.by_time:
            total = _Rounded.apply(total, self.kind, True, False)
        return total if module.bias is None else total + module.bias


class _Attention(Attending):
    """Attention as ranks of ``cp`` compute it."""

    def __init__(self, placement: Placement, model: nn.Module, randomness: Randomness) -> None:
        layout = placement.layout
        self.ranks, self.rank, self.randomness = layout.cp, 0, randomness
        self.exchanges, self.kind = layout.cp_kind == "ulysses", layout.activations
        self.over = layout.tp if any(one.heads for one in placement.plan.containers.values()) else 1
        """Ranks of ``tp`` that heads are divided between."""
        self.time: int | None = None
        """Positions of the block that computes just now, outside of its attention."""
        for name in placement.anatomy.blocks:
            block = model.get_submodule(name)
            self.reach(block)
            wrap(block, Around("attention of ranks", self._block))
        hugging_face.reach_attention(model, self)
        assert isinstance(randomness.answers, Answers)
        randomness.answers.before[F.scaled_dot_product_attention] = self.sdpa

    def _block(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        self.time = first_tensor(args, kwargs).shape[TIME]
        try:
            return forward(*args, **kwargs)
        finally:
            self.time = None

    def attention(
        self, attend: Attend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool,
        *, time: int, draws: bool,
    ) -> Any:  # fmt: skip
        length = self.time
        if length is None or key.shape[-2] != length or query.shape[-2] != length:
            return attend(query, key, value, mask, causal)
        self.time = None
        if key.shape[-3] < self.over:  # ranks of tp with the same key-value head have its gradients each by itself
            key, value = (x.repeat_interleave(self.over // x.shape[-3], -3) for x in (key, value))
        try:
            if self.exchanges:
                return self._exchanged(attend, query, key, value, mask, causal)
            calls, every = self.randomness.calls, []
            for rank in range(self.ranks):
                with self.randomness.again(calls) if rank else nullcontext():
                    every.append(attend(query, *self._received(key, value), mask, causal))
            return _first(self._by_position(length, time), *every)
        finally:
            self.time = length

    def _received(self, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """By a rank: of it come all gradients of what this gives."""
        if key.shape == value.shape:
            return _Rounded.apply(key, self.kind), _Rounded.apply(value, self.kind)
        both = _Rounded.apply(torch.cat([key, value], -1), self.kind)
        return both.split([key.shape[-1], value.shape[-1]], -1)

    def _by_position(self, length: int, time: int) -> Callable[..., Tensor]:
        """Of what ranks give, each one's own positions: its chunk from the front, and its chunk from the back."""
        chunk = torch.arange(length) // -(-length // (2 * self.ranks))
        rank = torch.minimum(chunk, 2 * self.ranks - 1 - chunk)

        def picked(*every: Tensor) -> Tensor:
            shape = [length if dim == time % every[0].ndim else 1 for dim in range(every[0].ndim)]
            place = rank.to(every[0].device).view(shape)
            own = [one.where(place == number, 0) for number, one in enumerate(every)]
            return torch.stack(own).sum(0)

        return picked

    def _exchanged(
        self, attend: Attend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
    ) -> Any:
        heads, shared = query.shape[-3] // self.over, key.shape[-3] // self.over  # a rank of tp's
        fitting = (n for n in range(1, heads + 1) if shared * n % self.ranks == 0 == heads % (shared * n))
        times = next(fitting, 1)  # so often a key-value head is sent
        width = math.gcd(query.shape[-1], key.shape[-1], value.shape[-1])
        came = (
            _Rounded.apply(x.unflatten(-1, (-1, width)), self.kind).flatten(-2)
            for x in (query, key.repeat_interleave(times, -3), value.repeat_interleave(times, -3))
        )
        return _first(lambda x: _Rounded.apply(x, self.kind), attend(*came, mask, causal))


def _first(join: Callable[..., Tensor], *every: Any) -> Any:
    """What attention gives, or the first of what it gives, made one."""
    if isinstance(every[0], tuple):
        return (join(*(one[0] for one in every)), *every[0][1:])
    return join(*every)


class _Rounded(Function):
    """Rounded, and its gradient too, or one of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, forward: bool = True, backward: bool = True) -> Tensor:
        ctx.kind, ctx.rounds = kind, backward
        return rounded(kind, x) if forward else x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return rounded(ctx.kind, gradient) if ctx.rounds else gradient, None, None, None


def rounded(kind: str, x: Tensor) -> Tensor:
    """Numbers as they arrive."""
    if kind == "bf16":
        return x.to(torch.bfloat16).to(x.dtype)
    scale = (x.abs().amax(-1, keepdim=True) / 448).float().to(x.dtype)
    codes = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.to(x.dtype) * scale).where(scale != 0, 0)


def chunked(layout: Layout) -> bool:
    """Whether it matters how long samples are that are computed with a sample: ranks have chunks of that length."""
    return layout.activations != EXACT and layout.cp > 1 and layout.cp_kind == "gather"


def shares(layout: Layout, batch: int, slots: int, tokens: np.ndarray | None) -> list[tuple[int, int]]:
    """The slots that are computed together under a layout."""
    if layout.exact:
        return parts(0, slots, layout.exact, tokens)
    ranks, number = layout.batch_ranks, layout.micro_batches(batch)
    return [own for rank in range(ranks) for own in share(slots, number, ranks, rank, tokens)]


def rounding(layout: Layout) -> str:
    """What of a layout rounds, or has sites train by themselves, in its own words."""
    sends = layout.pp * layout.ep * layout.tp * layout.cp > 1
    narrow = f"activations={layout.activations}" if layout.activations != EXACT and sends else ""
    return ",".join(filter(None, [f"comm={layout.comm}" if layout.coded_axis or layout.local else "", narrow]))
