"""A copy of a task with another class before its own, which can be sent to another process all the same."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from phalanx.task import Task


class Variant(Task):
    """What may stand before a task's own class."""

    def sent(self) -> set[str]:
        """The attributes that travel: not what the task has kept for itself since, which may be an open file."""
        return {f.name for f in dataclasses.fields(self)}

    def __copy__(self) -> Any:
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        return made

    def __reduce__(self) -> Any:
        before: list[type[Variant]] = []
        kind: type[Task] = type(self)
        while issubclass(kind, Variant):
            first, kind = kind.__bases__
            before.insert(0, first)
        sent = self.sent()
        return _made, (kind, before, {name: value for name, value in vars(self).items() if name in sent})


def variant(task: Task, before: type[Variant], **attributes: Any) -> Any:
    """A copy of a task with a class before its own, and with these attributes."""
    made = copy.copy(task)
    object.__setattr__(made, "__class__", _kind(before, type(task)))
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made


def _kind(before: type[Variant], kind: type[Task]) -> type[Task]:
    return type(kind.__name__, (before, kind), {"__module__": kind.__module__})


def _made(kind: type[Task], before: list[type[Variant]], attributes: dict[str, Any]) -> Task:
    for first in before:
        kind = _kind(first, kind)
    made = object.__new__(kind)
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made
