"""A frozen model beside another one: both are called with the same, and what the other gives stands beside the output.

It is a module within the model, under a name of its own, and so sharded and cut as the model itself is.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from phalanx.anatomy import Anatomy


def put_beside(model: nn.Module, name: str, other: nn.Module) -> None:
    """Have a language model's output be a dict of its ``logits`` and, under ``name``, those of a frozen one."""
    for weight in other.parameters():
        weight.requires_grad_(False)
    model.add_module(name, other)
    model.beside_names = (name,)  # type: ignore[assignment]
    model.register_forward_hook(partial(_both, name), with_kwargs=True)


def beside_names(model: nn.Module) -> tuple[str, ...]:
    """The frozen models that were put beside this one; mostly there are none."""
    return getattr(model, "beside_names", ())


def _both(name: str, model: nn.Module, args: Any, kwargs: Any, output: Any) -> dict[str, Any]:
    with torch.no_grad():
        return {"logits": output.logits, name: model.get_submodule(name)(*args, **kwargs).logits}


def anatomy_beside(model: nn.Module, name: str) -> Anatomy:
    """What both consist of: the blocks of each are a chain of their own."""
    other = model.get_submodule(name)
    vars(model)["_modules"].pop(name)
    try:
        own = Anatomy.of(model)
    finally:
        model.add_module(name, other)
    frozen = Anatomy.of(other)
    within = [f"{name}.{block}" for block in frozen.blocks]
    splits = {**own.splits, **{f"{name}.{module}": split for module, split in frozen.splits.items()}}
    experts = [*own.experts, *(f"{name}.{module}" for module in frozen.experts)]
    return Anatomy.of(
        model, blocks=[*own.blocks, *within], splits=splits or None, experts=experts or None, apart=[name]
    )
