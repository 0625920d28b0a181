"""Constants in a loss made as wide as what they meet: it is tried in float64, and people write float32 ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

NARROW = (torch.float32, torch.bfloat16, torch.float16)


class Widened(TorchFunctionMode):
    """Makes constants float64 where they meet float64. Float32 numbers are float64 numbers: nothing is rounded."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        in_place = getattr(func, "__name__", "").endswith("_")  # what is written to keeps its dtype
        if not in_place and "out" not in kwargs:
            given = [*args, *kwargs.values()]
            every = [t for item in given for t in (item if isinstance(item, (list, tuple)) else [item])]
            if any(isinstance(t, Tensor) and t.dtype == torch.float64 for t in every):
                args = tuple(_wide(item) for item in args)
                kwargs = {name: _wide(item) for name, item in kwargs.items()}
        return func(*args, **kwargs)


def _wide(item: Any) -> Any:
    if type(item) in (list, tuple):
        return type(item)(_wide(inner) for inner in item)
    narrow = isinstance(item, Tensor) and item.dtype in NARROW and not item.requires_grad
    return item.double() if narrow else item
