"""Where a run stands: an engine that is told so goes on from there."""

from __future__ import annotations

import phalanx
from phalanx.train.standing import facts_of, resume
from tests.tasks import Digits


def test_an_engine_goes_on_from_what_another_says() -> None:
    with phalanx.Engine(Digits(), device="cpu") as engine:
        batches = engine.batches()
        for _ in range(2):
            engine.step(next(batches))
        facts = facts_of(engine)
    assert (facts["step"], facts["samples"], facts["terms"]) == (2, 16, 16)
    with phalanx.Engine(Digits(), device="cpu") as other:
        resume(other, facts)
        assert facts_of(other) == facts
        assert next(other.batches()).step == 2
        assert list(other.just_agreed) == [2]
