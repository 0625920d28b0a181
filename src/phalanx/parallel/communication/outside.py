"""Collectives that others than us, user code above all, call through torch.distributed: noted in the flight record too.

Messages between two ranks are not: which ranks take part in one is not known.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx import user_code
from phalanx.flight import OUTSIDE
from phalanx.parallel.communication.recorder import FlightRecorder

KINDS = {
    "all_reduce": "all-reduce", "all_gather": "all-gather", "all_gather_into_tensor": "all-gather",
    "all_gather_single": "all-gather", "all_gather_object": "words", "reduce_scatter": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter", "reduce_scatter_single": "reduce-scatter", "all_to_all": "all-to-all",
    "all_to_all_single": "all-to-all", "broadcast": "broadcast", "broadcast_object_list": "words", "reduce": "reduce",
    "gather": "gather", "scatter": "scatter", "gather_object": "words", "barrier": "barrier",
}  # fmt: skip
"""By function, what kind of collective it is."""
TORCH = f"{Path(torch.__file__).parent}{os.sep}"
OWN_PART = {"all_gather": 1, "all_gather_into_tensor": 1, "all_gather_single": 1}
"""Which of its arguments is what a rank brings, where it is not the first."""


def record_outside(recorder: FlightRecorder) -> Callable[[], None]:
    """From now on those of this process's main thread are recorded; what undoes it."""
    replaced = {name: getattr(dist, name) for name in KINDS if hasattr(dist, name)}
    others: dict[int, tuple[bool, CodeType]] = {}

    def called_by_others(code: CodeType) -> bool:
        known = others.get(id(code))
        if known is None:
            known = others[id(code)] = _is_others(code.co_filename), code
        return known[0]

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if (
                torch.compiler.is_compiling()
                or threading.current_thread() is not threading.main_thread()
                or not called_by_others(sys._getframe(1).f_code)
            ):
                return function(*args, **kwargs)
            number = 0
            with suppress(Exception):  # what is wrong with a call is the call's own to say
                number = _launched(recorder, name, args, kwargs)
            if not number or kwargs.get("async_op"):
                return function(*args, **kwargs)
            recorder.waiting(number)
            found = function(*args, **kwargs)
            recorder.left(number)
            return found

        return noted

    for name, function in replaced.items():
        setattr(dist, name, recorded(name, function))

    def undo() -> None:
        for name, function in replaced.items():
            setattr(dist, name, function)

    return undo


def _is_others(file: str) -> bool:
    """Whether a file is neither ours nor torch's."""
    return user_code.is_users_line(file) or not file.startswith((f"{user_code.OWN}{os.sep}", TORCH))


def _launched(recorder: FlightRecorder, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The number of its record."""
    given = [*args, *kwargs.values()]
    if any(isinstance(each, int) and each == dist.GroupMember.NON_GROUP_MEMBER for each in given):
        return 0  # a group that this rank is none of: torch does nothing
    group = next((each for each in given if isinstance(each, dist.ProcessGroup)), None) or dist.group.WORLD
    assert group is not None
    named = f"{OUTSIDE} {group.group_name}"
    return recorder.launched(named, OUTSIDE, group.size(), KINDS[name], _brought(name, args, kwargs))


def _brought(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What this rank brings to it."""
    candidates = [*args[OWN_PART.get(name, 0) :], *(kwargs.get(word) for word in ("tensor", "input_tensor", "input"))]
    return next((each for each in candidates if isinstance(each, Tensor)), torch.empty(0))
