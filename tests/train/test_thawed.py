"""What begins frozen is trained sooner, and the user's own task and callbacks stay as they are."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field

from phalanx import Callback, Freeze, ParameterGroup
from phalanx.train.thawed import thawed
from phalanx.train.trying import Tried
from phalanx.train.variant import variant
from tests.prove.tasks import Plain

FREEZE = Freeze("0.*", until=100)


@dataclass
class Begins(Plain):
    parameters: dict[str, ParameterGroup] = field(
        default_factory=lambda: {"2.weight": ParameterGroup(frozen_steps=50), "0.*": ParameterGroup(clip=1.0)}
    )

    def callbacks(self) -> list[Callback]:
        return [FREEZE, Freeze("2.bias", since=3, until=9)]


def test_what_begins_frozen_is_so_for_fewer_steps() -> None:
    task = thawed(Begins(), 1)
    assert isinstance(task, Begins)
    assert [task.parameters[name].frozen_steps for name in ("2.weight", "0.*")] == [1, None]
    assert [(each.since, each.until) for each in task.callbacks()] == [(0, 1), (3, 9)]  # type: ignore[attr-defined]
    assert FREEZE.until == 100
    assert Begins().parameters["2.weight"].frozen_steps == 50


def test_or_not_at_all_also_in_another_process() -> None:
    task = pickle.loads(pickle.dumps(variant(thawed(Begins(), 0), Tried)))
    assert task.parameters["2.weight"].frozen_steps == 0
    assert [each.since for each in task.callbacks()] == [3]


def test_a_task_that_freezes_nothing_is_itself() -> None:
    task = Plain()
    assert thawed(task, 0) is task
