"""What --profile asks for is attached to an engine, and leaves nothing on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx import Engine, Run
from phalanx.train.options import Options
from phalanx.train.profile.attached import profiled
from tests.ranks import Ranks
from tests.tasks import Digits


def trained(folder: Path, profile: str | None, fails: bool = False) -> tuple[list[str], int, list[str]]:
    """What is left in a run's folder, of watchers, and what was said."""
    said: list[str] = []
    with Engine(Digits(), "dp=1", device="cpu") as engine:
        try:
            with profiled(Options(profile=profile), engine, Run(folder), 1, lambda: None, said.append):
                engine.callbacks.call("on_start", engine)
                for batch in engine.batches():
                    engine.step(batch)
                    if fails and engine.step_number == 3:
                        raise KeyError("x")
        except KeyError:
            assert fails
        watching = [*engine.clock.watchers[1:], *engine.traffic.watchers, *engine.traffic.wait_watchers]
        hooks = [hook for module in engine.model.modules() for hook in module._forward_hooks]
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return files, len(watching) + len(hooks), said


@pytest.mark.parametrize(
    ("profile", "left"),
    [
        (None, []),
        ("2:3", ["profile/steps-2-3/rank-00000.json.gz"]),
        ("modules", ["profile/modules/rank-00000.json"]),
    ],
)
def test_what_is_asked_for_is_left(ranks: Ranks, tmp_path: Path, profile: str | None, left: list[str]) -> None:
    ((files, watching, said),) = ranks(1, trained, tmp_path, profile)
    assert files == left
    assert watching == 0
    assert len(said) == bool(profile)


@pytest.mark.parametrize("profile", ["2:5", "modules@4"])
def test_after_an_error_nothing_is(ranks: Ranks, tmp_path: Path, profile: str) -> None:
    ((files, watching, said),) = ranks(1, trained, tmp_path, profile, True)
    assert files == []
    assert watching == 0
    assert not said


def begun(folder: Path) -> list[str]:
    said: list[str] = []
    with (
        Engine(Digits(steps=14), "dp=1", device="cpu") as engine,
        profiled(Options(profile="1:14"), engine, Run(folder), 1, lambda: None, said.append),
    ):
        engine.callbacks.call("on_start", engine)
        engine.step(next(engine.batches()))
    return said


def test_a_trace_that_is_large_is_said_to_be(ranks: Ranks, tmp_path: Path) -> None:
    (said,) = ranks(1, begun, tmp_path)
    assert said[0] == "   note  a trace of 14 steps is large, and slow to write and to open"
