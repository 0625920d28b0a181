"""Copies of tasks with another class before their own travel, without what they keep for themselves."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import phalanx
from phalanx.train.variant import Variant, variant
from tests.tasks import Digits


class Loud(Variant):
    volume: int

    def sent(self) -> set[str]:
        return super().sent() | {"volume"}

    def name(self) -> str:
        return f"{super().name()}!" * self.volume


class Quiet(Variant):
    def name(self) -> str:
        return super().name().lower()


@dataclass
class Named(Digits):
    called: str = "Task"

    def name(self) -> str:
        return self.called


def test_classes_stand_before_each_other_and_travel() -> None:
    task = Named(width=5)
    made: Any = variant(variant(task, Quiet), Loud, volume=2)
    assert (made.name(), made.width, type(made).__name__) == ("task!task!", 5, "Named")
    assert not isinstance(task, Variant)
    object.__setattr__(made, "cache", lambda: "cannot be pickled")
    there = pickle.loads(pickle.dumps(made))
    assert (there.name(), there.width, hasattr(there, "cache")) == ("task!task!", 5, False)
    assert isinstance(there, phalanx.Task)


def test_a_copy_in_the_same_process_keeps_everything() -> None:
    made: Any = variant(Named(), Loud, volume=1)
    object.__setattr__(made, "cache", [1])
    other = copy.copy(made)
    assert other.cache is made.cache
    assert type(other) is type(made)
