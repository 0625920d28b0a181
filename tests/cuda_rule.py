"""The rule of a build of torch with CUDA, on any build: a process forked from one that has run autograd must not."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

_ran = _refused = False


def _ruled(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        global _ran
        if _refused:
            raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")
        _ran = True
        return function(*args, **kwargs)

    return call


def _forked() -> None:
    global _refused
    _refused = _refused or _ran


def apply() -> None:
    """From now on, in this process and in all that are forked from it."""
    torch.autograd.backward, torch.autograd.grad = map(_ruled, (torch.autograd.backward, torch.autograd.grad))
    os.register_at_fork(after_in_child=_forked)
