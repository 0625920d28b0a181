"""The two ways Phalanx says no. Every message ends in what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from phalanx.redact import redact


class WrongUse(ValueError):
    """What was asked for cannot work; the message names the cause and ends in what to do."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(redact(message))


class CannotHere(RuntimeError):
    """The request is right, but this machine cannot do it."""

    exit_code = 3

    def __init__(self, message: str) -> None:
        super().__init__(redact(message))


REFUSALS: dict[int, type[WrongUse | CannotHere]] = {kind.exit_code: kind for kind in (WrongUse, CannotHere)}
"""By the exit code of a process that said so."""
OUTSIDE = ("TimeoutError", "ConnectionError")
"""Classes of that name, whoever's: cloud storage has its own."""


def may_pass(error: BaseException) -> bool:
    """Whether it, or what caused it, comes of storage or a network: that may pass however often it comes."""
    if isinstance(error, (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)):
        return False
    if isinstance(error, OSError) or any(kind.__name__ in OUTSIDE for kind in type(error).__mro__):
        return True
    return getattr(error, "may_pass", False) or (error.__cause__ is not None and may_pass(error.__cause__))


MOST_NAMES = 12


def closest(word: str, known: Iterable[str]) -> str:
    """A clause that points at the nearest known name, e.g. ``did you mean 'width'?``."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]!r}?"
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"choose one of: {', '.join(names[:MOST_NAMES])}{more}" if names else "there are none to choose from"
