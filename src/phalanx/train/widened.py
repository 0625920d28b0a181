"""A task's own code computed in float64, though people write it for float32: its constants and casts are made wider."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from phalanx import user_code

NARROW = (torch.float32, torch.bfloat16, torch.float16)
CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)
AS_IT_LIES = (Tensor.view, torch.frombuffer)
"""Functions whose dtype says what bytes mean: no other would do."""


class Widened(TorchFunctionMode):
    """Makes constants float64 where they meet float64. Float32 numbers are float64 numbers: nothing is rounded."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        in_place = getattr(func, "__name__", "").endswith("_")  # what is written to keeps its dtype
        if not in_place and "out" not in kwargs and _any_wide(args, kwargs):
            args = tuple(_wide(item) for item in args)
            kwargs = {name: _wide(item) for name, item in kwargs.items()}
        return func(*args, **kwargs)


class Float64(Widened):
    """Also makes float64 what would be float32 by default, and what the user's code casts to a lower precision."""

    def __init__(self) -> None:
        super().__init__()
        self.lifted = 0
        """Numbers that would have been of a lower precision."""

    def __enter__(self) -> Self:
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self._default)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, kwargs = args, kwargs or {}
        narrow = func not in AS_IT_LIES and any(_is_narrow(item) for item in (*args, *kwargs.values()))
        if (narrow or func in CASTS) and user_code.asks():
            func = Tensor.double if func in CASTS else func
            args = tuple(torch.float64 if _is_narrow(item) else item for item in args)
            kwargs = {name: torch.float64 if _is_narrow(item) else item for name, item in kwargs.items()}
        made = super().__torch_function__(func, types, args, kwargs)
        if isinstance(made, Tensor) and made.dtype == torch.float64 and not _any_wide(given, kwargs):
            self.lifted += user_code.asks()
        return made


def _is_narrow(item: Any) -> bool:
    return isinstance(item, torch.dtype) and item in NARROW


def _any_wide(args: Any, kwargs: Any) -> bool:
    given = [*args, *kwargs.values()]
    every = [t for item in given for t in (item if isinstance(item, (list, tuple)) else [item])]
    return any(isinstance(t, Tensor) and t.dtype == torch.float64 for t in every)


def _wide(item: Any) -> Any:
    if type(item) in (list, tuple):
        return type(item)(_wide(inner) for inner in item)
    narrow = isinstance(item, Tensor) and item.dtype in NARROW and not item.requires_grad
    return item.double() if narrow else item
