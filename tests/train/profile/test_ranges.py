"""Names of what an engine does, as torch's profiler sees them."""

from __future__ import annotations

from torch.profiler import ProfilerActivity, profile

from phalanx import Engine
from phalanx.train.profile.ranges import Ranges
from tests.ranks import Ranks
from tests.tasks import Digits


def seen(layout: str) -> tuple[list[str], int]:
    """Names of ranges in the second step of three, and how many are told of after."""
    with Engine(Digits(), layout, device="cpu") as engine:
        batches = engine.batches()
        engine.step(next(batches))
        with profile(activities=[ProfilerActivity.CPU]) as found:
            with Ranges(engine) as ranges:
                with engine.clock.beside("data"):
                    batch = next(batches)
                engine.step(batch)
                ranges.end_step()
            engine.step(next(batches))
        watching = [*engine.clock.watchers[1:], *engine.traffic.watchers, *engine.traffic.wait_watchers]
        events = [event.name for event in found.events() or ()]
        return [n for n in events if n.startswith(("step ", "phase: ", "wait: ", "launch: "))], len(watching)


def test_phases_and_collectives_have_names_and_only_while_they_are_asked_for(ranks: Ranks) -> None:
    for names, watching in ranks(2, seen, "dp=2"):
        assert names.count("step 2") == 1
        assert "step 3" not in names
        for phase in ("data", "forward", "backward", "reduce", "update"):
            assert names.count(f"phase: {phase}") == 1
        assert "wait: dp all-reduce" in names
        assert any(name.startswith("launch: dp all-reduce, ") for name in names)
        assert watching == 0
