"""Weights whose gradients are all zeros are noted, and only those."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx import Engine
from phalanx.train.dead_gradients import DeadGradients
from tests.ranks import Ranks
from tests.tasks import Digits


def trained(layout: str, until: int) -> Any:
    noted: list[dict[str, Any]] = []
    with Engine(Digits(steps=18), layout) as engine:
        engine.callbacks.add(DeadGradients(engine, lambda kind, **fields: noted.append({"kind": kind, **fields})))
        engine.model.get_submodule("0").register_forward_hook(
            lambda module, given, output: output * (engine.step_number >= until)
        )
        for batch in engine.batches():
            engine.step(batch)
    return [(each["kind"], each["step"], each["steps"], each["weights"]) for each in noted]


@pytest.mark.parametrize("layout", ["dp=2", "fsdp=2,zero=3"])
def test_they_are_noted_and_also_that_they_are_not_any_more(ranks: Ranks, layout: str) -> None:
    for noted in ranks(2, trained, layout, 12):
        assert [each[:3] for each in noted] == [("dead gradients", 8, 8), ("dead gradients", 16, 16)]
        assert {"0.weight", "0.bias"} <= set(noted[0][3])
        assert not noted[1][3]


def test_weights_that_learn_are_not_noted(ranks: Ranks) -> None:
    assert ranks(2, trained, "dp=2", 0) == [[], []]
