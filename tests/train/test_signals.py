"""Signals: what any rank has set is what every rank reads, after the same step."""

from __future__ import annotations

import pytest
import torch

from phalanx import Engine, Layout
from phalanx.train.signals import NAMES, Signals
from tests.ranks import Ranks
from tests.tasks import Digits


def test_what_is_packed_is_unpacked() -> None:
    for name in NAMES:
        own = Signals(**{name: True})
        sums = 3 * torch.tensor(own.packed()) + torch.tensor(Signals().packed())
        assert Signals.unpacked(sums.tolist()) == own
        assert own.names() == [name]
    assert Signals.unpacked([0.0] * len(NAMES)) == Signals()


def heard(layout: str) -> list[list[str]]:
    """In each step another rank has something to say, and in the last one nobody."""
    found = []
    with Engine(Digits(steps=3, global_batch=8), Layout.parse(layout), device="cpu") as engine:
        for batch in engine.batches():
            engine.signals = Signals(save=engine.rank == batch.step, busy=engine.rank + batch.step == 1)
            found.append(engine.step(batch).signals.names())
    return found


@pytest.mark.parametrize("layout", ["dp=2", "fsdp=2", "fsdp=2,exact=4"])
def test_every_rank_reads_those_of_any(ranks: Ranks, layout: str) -> None:
    for found in ranks(2, heard, layout):
        assert found == [["save", "busy"], ["save", "busy"], []]
