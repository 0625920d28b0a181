"""Which fields a run's events have, and of which types: what a reader of a folder's events may rely on.

Whoever wrote the folder may have written anything. An event that has a field of another type, or lacks one that its
kind always has, is no event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], bool]
LARGEST = 1 << 53
"""Whole numbers from here on are not exact where numbers are floating."""
MOST_DEPTH = 4
"""Of objects and lists in each other."""
NOT_FINITE = ("nan", "inf", "-inf")
"""As events write them, for which JSON has no word."""


def is_index(value: Any) -> bool:
    """Whether it is a whole number from 0."""
    return type(value) is int and 0 <= value < LARGEST


def is_number(value: Any) -> bool:
    """Whether it is a finite number."""
    return (type(value) is int and abs(value) < LARGEST) or (type(value) is float and abs(value) < float("inf"))


def is_figure(value: Any) -> bool:
    """Whether it is a number, finite or not."""
    return type(value) is float or is_number(value) or value in NOT_FINITE


def is_text(value: Any) -> bool:
    """Whether it is a text."""
    return type(value) is str


def _is_rank(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _is_time(value: Any) -> bool:
    return is_number(value) and 0 <= value < 1e11  # of which the system makes a date


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(is_number(each) for each in value.values())


def _are_figures(value: Any) -> bool:
    return isinstance(value, dict) and all(is_figure(each) for each in value.values())


def _are_ranks(value: Any) -> bool:
    return isinstance(value, list) and all(_is_rank(each) for each in value)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(is_text(each) for each in value)


def is_flag(value: Any) -> bool:
    """Whether it is true or false, or a number in their place."""
    return type(value) in (bool, int)


def are_objects(value: Any) -> bool:
    """Whether it is a list of JSON objects."""
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


_FIELDS: dict[str, Check] = {
    "time": _is_time, "step": is_index, "rank": _or_none(_is_rank), "world": is_index, "generation": _is_rank,
    "loss": _or_none(is_figure), "losses": _are_figures, "logged": _are_figures, "sent": _are_numbers,
    "held_out": _or_none(_are_figures), "grad_norm": is_figure, "count": is_figure, "slots": is_figure,
    "tflops": is_figure, "skipped": is_flag, "last": is_flag, "bad": is_text, "turn": is_text,
    "samples": is_text, "of": is_index,
    "reason": is_text, "action": is_text, "on": is_text, "layout": is_text, "source": _or_none(is_text),
    "where": is_text, "module": _or_none(is_text), "seconds": is_number, "ranks": _are_ranks, "weights": _are_texts,
    "found": _are_texts, "sample_ids": lambda value: isinstance(value, list), "steps": is_index,
}  # fmt: skip
_NUMBERS = ("exposed_", "overlapped_", "memory_")
"""How names of numbers begin that are told by axis, or by what memory is for."""
_OF_STEPS = _FIELDS | {"seconds": _are_numbers}
_OF_EVALUATIONS = _FIELDS | {"held_out": _are_figures}
_NEEDED = {
    "step": ("step",), "round": ("step",), "left out": ("step",), "checkpoint": ("step",),
    "evaluation": ("step", "held_out"), "bad": ("step", "reason"), "corrupted": ("step", "ranks", "reason"),
    "replay": ("ranks",), "dead gradients": ("weights", "steps", "of", "step"),
    "pause": ("on", "step", "seconds", "last", "where"), "rollback": (), "start": (),
}  # fmt: skip
"""Fields that a kind always has, among those that readers look at."""


def is_event(event: Mapping[str, Any]) -> bool:
    """Whether an object is an event: each field that is known is of its type, and none is nested deeply."""
    kind = event.get("kind")
    if type(kind) is not str:
        return False
    checks = _OF_STEPS if kind in ("step", "round") else _OF_EVALUATIONS if kind == "evaluation" else _FIELDS
    for name, value in event.items():
        check = is_number if name.startswith(_NUMBERS) or name.endswith("_seconds") else checks.get(name)
        if check is not None:
            if not check(value):
                return False
        elif isinstance(value, (dict, list)) and not _is_shallow(value, MOST_DEPTH):
            return False
    return all(name in event for name in _NEEDED.get(kind, ()))


def _is_shallow(value: Any, most: int) -> bool:
    if not isinstance(value, (dict, list)):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return most > 0 and all(_is_shallow(each, most - 1) for each in inner)
