"""What a block is called with: the residual stream, and what else goes along."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import WrongUse
from phalanx.torch_errors import About, is_about

TIME = 1
"""The dim of ``[batch, time, width]`` by which the stream is cut."""


def shapeless(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of the same shape without values; in another dtype, if it has a floating one."""
    kept = dtype if tensor.is_floating_point() else tensor.dtype
    bare = torch.empty(tensor.shape, dtype=kept, device="meta")
    return nn.Parameter(bare, requires_grad=False) if isinstance(tensor, nn.Parameter) else bare


def shadow(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of a module whose weights and buffers are shapes alone."""
    memo: dict[int, Any] = {id(t): shapeless(t, dtype) for t in [*module.parameters(), *module.buffers()]}
    return copy.deepcopy(module, memo)


def about_sizes(error: Exception) -> bool:
    """Whether torch complains that tensors do not fit together, or there are none of something."""
    return isinstance(error, ZeroDivisionError) or is_about(error, About.SIZES)


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def stream(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Tensor:
    """The residual stream among what a module is called with: its first tensor."""
    found = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    if found is None or found.ndim != 3:
        shape = "no tensor" if found is None else f"shape {tuple(found.shape)}"
        raise WrongUse(
            f"{name} is called with {shape} where tp, cp and pp need [batch, time, width]. "
            "Use fsdp instead, or give the blocks such an input first."
        )
    return found


def with_stream(
    args: tuple[Any, ...], kwargs: dict[str, Any], stream: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with another stream."""
    for index, value in enumerate(args):
        if isinstance(value, Tensor):
            return (*args[:index], stream, *args[index + 1 :]), kwargs
    first = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
    return args, kwargs | {first: stream}
