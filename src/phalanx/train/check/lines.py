"""Lines of the user's own files: where a mistake is, as far as that can be told."""

from __future__ import annotations

import inspect
import linecache
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from phalanx.parallel.randomness.answers import generator_state
from phalanx.user_code import innermost, is_ours, is_users_line, place

CALLER = str(Path(__file__).with_name("subject.py"))
"""From where the check calls the user's code."""


def written(file: str, line: int) -> str:
    """A line as messages show it: ``task.py:12: return phalanx.Loss(mean, 1)``."""
    where, text = place(file, line), linecache.getline(file, line).strip()
    return f"{where}: {text}" if text else where


def of_error(error: BaseException) -> str:
    """The innermost line of the user's that an error came through; empty if there is none."""
    frame = innermost(error.__traceback__)
    return written(frame.filename, frame.lineno or 0) if frame else ""


def of_refusal(error: BaseException, method: Any = None) -> str:
    """Likewise of what was refused, or of a method; empty where that is ours: what we refuse is in the message."""
    frame = innermost(error.__traceback__)
    if frame is not None:
        return "" if is_ours(frame.filename) else of_error(error)
    code = getattr(inspect.unwrap(method), "__code__", None) if method is not None else None
    return "" if code is not None and is_ours(code.co_filename) else first_of(method)


def last_in(text: str) -> str:
    """The last line of the user's in a traceback that was printed; empty if there is none."""
    found = [(file, int(line)) for file, line in re.findall(r'File "(.+?)", line (\d+)', text) if is_users_line(file)]
    return written(*found[-1]) if found else ""


def of(thing: Any) -> str:
    """Where a class or function of the user's begins; empty if it is somebody else's."""
    try:
        thing = inspect.unwrap(thing)
        file = inspect.getsourcefile(thing) or ""
        lines, first = inspect.getsourcelines(thing)
    except (OSError, TypeError, ValueError):
        return ""
    if not is_users_line(file):
        return ""
    skipped = next((n for n, line in enumerate(lines) if line.lstrip().startswith(("def ", "class ", "async "))), 0)
    return written(file, first + skipped)


def first_of(*things: Any) -> str:
    """The first of these that has a place in the user's files, or a place itself."""
    return next((found for thing in things if (found := thing if isinstance(thing, str) else of(thing))), "")


def at(place: str) -> str:
    """A place in brackets, to be put behind what is said of it."""
    return f" ({place})" if place else ""


def running() -> str:
    """The innermost line of the user's that is running; not of what has called the check."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != CALLER:
        if is_users_line(frame.f_code.co_filename):
            return written(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


@contextmanager
def returns(function: Callable[..., Any]) -> Iterator[Callable[[], str]]:
    """Meanwhile: where this function of the user's last returned."""
    code: CodeType | None = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    found = [""]

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and frame.f_code is code:
            found[0] = written(frame.f_code.co_filename, frame.f_lineno)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield lambda: found[0] if code is not None and is_users_line(code.co_filename) else ""
    finally:
        sys.setprofile(before if callable(before) else None)  # one written in C cannot be put back


def that_draws() -> AbstractContextManager[Callable[[], str]]:
    """Meanwhile: the first line of the user's that moved torch's, numpy's or Python's own generator."""
    return that_changes(lambda: generator_state(torch.device("cpu")))


@contextmanager
def that_changes(look_at: Callable[[], Any]) -> Iterator[Callable[[], str]]:
    """Meanwhile: the first line of the user's after which something looks otherwise."""
    state, last, found = [look_at()], [""], [""]

    def look(frame: FrameType, event: str, _: Any) -> Any:
        if not is_users_line(frame.f_code.co_filename):
            return None
        now = look_at()
        if now != state[0] and not found[0]:
            found[0] = last[0]
        state[0], last[0] = now, written(frame.f_code.co_filename, frame.f_lineno)
        return look

    def ended() -> str:
        return found[0] or (last[0] if state[0] != look_at() else "")

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield ended
    finally:
        sys.settrace(before)


@dataclass
class Call:
    """A torch function that was called."""

    name: str
    line: str
    given: list[Tensor]
    """What it gave."""
    generator: bool = False
    """It was told to draw from a generator of the user's."""


class Calls(TorchFunctionMode):
    """Notes every torch function that the user's code calls, in order, and what it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Call] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        drawn = isinstance((kwargs or {}).get("generator"), torch.Generator)
        given = [t.detach().clone() for t in _flat(result)]
        self.made.append(Call(getattr(func, "__name__", str(func)), running(), given, drawn))
        return result


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _flat(item)
