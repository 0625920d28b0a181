"""Checks of what a JSON file holds: each is a function of a value that says whether it is as it should be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], bool]
LARGEST = 1 << 60
"""No count, offset, size or length is larger."""


def is_count(value: Any) -> bool:
    """Whether this is a whole number from 0 on, of a size that can be."""
    return type(value) is int and 0 <= value <= LARGEST


def is_whole(value: Any) -> bool:
    """Whether this is a whole number, of any size."""
    return type(value) is int


def is_number(value: Any) -> bool:
    """Whether this is a number; it may be infinite, or none."""
    return type(value) in (int, float)


def is_text(value: Any) -> bool:
    """Whether this is text."""
    return isinstance(value, str)


def is_flag(value: Any) -> bool:
    """Whether this is True or False."""
    return isinstance(value, bool)


def is_plain(value: Any) -> bool:
    """Whether this is a number, text, True, False or None, or a list of them."""
    items = value if isinstance(value, list) else [value]
    return all(isinstance(item, (bool, int, float, str, type(None))) for item in items)


def anything(value: Any) -> bool:
    """What is not looked into."""
    return True


def maybe(check: Check) -> Check:
    """None, or what passes a check."""
    return lambda value: value is None or check(value)


def each(check: Check) -> Check:
    """A list of what passes a check."""
    return lambda value: isinstance(value, list) and all(map(check, value))


def table(check: Check) -> Check:
    """A dict whose values pass a check."""
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def row(*checks: Check) -> Check:
    """A list with one item for each of these checks, which it passes."""
    return lambda value: (
        isinstance(value, list)
        and len(value) == len(checks)
        and all(check(item) for check, item in zip(checks, value, strict=True))
    )


def record(needed: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """A dict with the keys that are needed, those that are optional or not, and no others."""
    known = {**(optional or {}), **needed}
    return lambda value: (
        isinstance(value, dict)
        and needed.keys() <= value.keys() <= known.keys()
        and all(known[name](item) for name, item in value.items())
    )


def short(value: Any) -> str:
    """A value for a message of one line."""
    return repr(str(value)[:60])
