"""A task whose weights that begin frozen are trained sooner, so that a few steps train everything that ever is."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from phalanx.callbacks import Callback, Freeze
from phalanx.task import Task
from phalanx.train.variant import Variant, variant


class Thawed(Variant):
    """Stands before a task's own class."""

    frozen_at_most: int
    """Steps that weights are frozen for at the beginning."""

    def sent(self) -> set[str]:
        return super().sent() | {"frozen_at_most"}

    def callbacks(self) -> list[Callback]:
        found: Any = super().callbacks()
        if not isinstance(found, (list, tuple)):  # refused by whoever asked
            return found
        if not self.frozen_at_most:
            return [each for each in found if not begins_frozen(each)]
        return [self._sooner(each) if begins_frozen(each) else each for each in found]

    def _sooner(self, freeze: Freeze) -> Freeze:
        found = copy.copy(freeze)
        assert freeze.until is not None
        found.until = min(freeze.until, self.frozen_at_most)
        return found


def begins_frozen(callback: Callback) -> bool:
    """Whether it leaves weights out of a run's first steps alone."""
    return isinstance(callback, Freeze) and callback.since == 0 and callback.until is not None


def thawed(task: Task, most: int) -> Task:
    """A copy whose `frozen_steps` and ``Freeze(until=)`` last so many steps ``most``."""
    groups = {
        pattern: group if group.frozen_steps is None else replace(group, frozen_steps=min(most, group.frozen_steps))
        for pattern, group in task.parameters.items()
    }
    if groups == task.parameters and type(task).callbacks is Task.callbacks:
        return task
    found: Task = variant(task, Thawed, parameters=groups, frozen_at_most=most)
    return found
