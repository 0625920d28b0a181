"""``activations`` on one device: what ranks send is rounded, and so are gradients on their way back.

The stream is rounded where a stage of the layout begins; a token for each expert that it goes to, and what each of them
makes of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from phalanx.comm import EXACT
from phalanx.layout import Layout
from phalanx.parallel.forward.calls import with_stream
from phalanx.parallel.forward.wrapper import Around, Forward, wrap
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


def _block(forward: Forward, kind: str, *args: Any, **kwargs: Any) -> Any:
    stream = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    args, kwargs = with_stream(args, kwargs, _Rounded.apply(stream, kind))
    return forward(*args, **kwargs)


def _experts(forward: Forward, experts: int, kind: str, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Each token's way to each of its experts, by itself."""
    token, choice = (chosen < experts).nonzero(as_tuple=True)
    rows = _Rounded.apply(hidden[token], kind)
    done = forward(rows, chosen[token, choice][:, None], rows.new_ones(len(rows), 1))
    weighted = _Rounded.apply(done, kind) * shares[token, choice][:, None].to(done.dtype)
    return torch.zeros_like(hidden).index_add(0, token, weighted)


class _Rounded(Function):
    """Rounded, and its gradient too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.kind = kind
        return rounded(kind, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return rounded(ctx.kind, gradient), None


def rounded(kind: str, x: Tensor) -> Tensor:
    """Numbers as they arrive."""
    if kind == "bf16":
        return x.to(torch.bfloat16).to(x.dtype)
    found = torch.empty(x.shape, dtype=x.dtype, device=x.device).view(-1, x.shape[-1])
    for row, into in zip(x.reshape(-1, x.shape[-1]), found, strict=True):
        scale = (row.abs().max() / 448).float().to(x.dtype)
        if scale == 0:
            into.zero_()
        else:
            into.copy_((row / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale)
    return found.view(x.shape)


def rounding(layout: Layout) -> str:
    """What of a layout rounds, or has sites train by themselves, in its own words."""
    narrow = f"activations={layout.activations}" if layout.activations != EXACT and layout.pp * layout.ep > 1 else ""
    return ",".join(filter(None, [f"comm={layout.comm}" if layout.coded_axis or layout.local else "", narrow]))
