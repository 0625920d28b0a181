"""Goodput: every second since a run began is somewhere, once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.run import Run
from phalanx.watch.goodput import AGAIN, AWAY, BETWEEN, FAILED, STARTING, TRAINED, goodput
from tests.test_cli import phalanx


def step(time: float, number: int, seconds: float = 1.0, **more: Any) -> dict[str, Any]:
    phases = {"forward": seconds / 4, "backward": 3 * seconds / 4}
    return {"kind": "step", "time": time, "step": number, "samples": "", "seconds": phases, "skipped": False, **more}


def written(folder: Path, *events: dict[str, Any]) -> Run:
    run = Run(folder)
    run.events_path(0).parent.mkdir(parents=True)
    run.events_path(0).write_text("".join(json.dumps(event) + "\n" for event in events))
    return run


def test_every_second_has_its_name(tmp_path: Path) -> None:
    run = written(
        tmp_path,
        {"kind": "check", "time": 100.0},
        {"kind": "start", "time": 102.0, "step": 0},
        step(105.0, 0),  # 2 s until it began
        step(106.0, 1),
        step(109.0, 2),  # evaluated for 2 s
        {"kind": "start", "time": 113.0, "step": 1},  # one was killed
        step(114.5, 1),
        step(115.5, 2, skipped=True),
        {"kind": "stopped", "time": 116.0, "step": 3},
        {"kind": "start", "time": 1000.0, "step": 3},
        step(1001.0, 3),
    )
    found = goodput(list(run.events(0)))
    assert found is not None
    assert found.parts == {
        STARTING: 2 + 2 + 0.5, TRAINED: 3.0, AGAIN: 3.0, BETWEEN: 2.0 + 0.5, FAILED: 4.0, AWAY: 884.0,
    }  # fmt: skip
    assert found.total == 901.0
    assert str(found) == (
        "goodput: 18% of 17 s trained; 26% start-up; 24% after failures, until ranks ran again; 18% steps that were "
        "done again or left out; 15% between steps: evaluation, saving, callbacks; 14 min 44 s while nobody ran it, "
        "not counted"
    )


def around(clock: Callable[[float], float], steps: int = 20) -> list[dict[str, Any]]:
    """A step of 1 s each 2 s, by a clock that somebody sets."""
    beside = {"other_seconds": 0.75, "checkpoint_seconds": 0.25}
    events = [{"kind": "start", "time": clock(0.0), "step": 0}]
    return [*events, *(step(clock(2.0 * (n + 1)), n, **beside) for n in range(steps))]


def test_a_clock_that_goes_back_takes_nothing_from_what_steps_measured() -> None:
    even = goodput(around(lambda now: 10_000.0 + now))
    assert even is not None
    assert (even.set_back, even.parts[TRAINED], even.parts[BETWEEN]) == (0, 20.0, 19.0)
    back = goodput(around(lambda now: 10_000.0 + now - 3600 * (now > 19)))
    assert back is not None
    assert (back.parts[TRAINED], back.parts[BETWEEN], back.ran) == (20.0, 19.0, even.ran)
    assert back.share == even.share
    assert str(back).endswith("; the clock went back by 1 h: what passed then is known by steps alone")
    twice = goodput(around(lambda now: 10_000.0 + now - 3600 * (9 < now < 31)))
    assert twice is not None
    assert abs(twice.ran - even.ran) < 1
    assert "1 h while the clock was set forward, or the machine slept, not counted" in str(twice)


def test_short_lines_have_no_seconds_of_their_own() -> None:
    """Of a later step those of others stand for its own: what is counted is no more than passed."""
    late = [event | {"step": event["step"] + 5000} for event in around(lambda now: 10_000.0 + now / 4)[1:]]
    found = goodput([{"kind": "start", "time": 10_000.0, "step": 5000}, *late])
    assert found is not None
    assert found.ran == 10.0


def test_a_run_without_steps_has_none(tmp_path: Path) -> None:
    assert goodput([{"kind": "start", "time": 1.0, "step": 0}]) is None


def test_why_tells_it_of_a_run_that_lost_a_rank(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("from tests.tasks import Digits\nclass Mine(Digits):\n    pass\n")
    words = ["task.py", "--on", "local:2", "--steps", "12", "--kill", "1@8", "--memory-steps", "5", "--run", "run"]
    done = phalanx("train", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = goodput(list(Run(tmp_path / "run").events(0)))
    assert found is not None
    assert found.parts[FAILED] > 0 < found.parts[AGAIN]
    events = list(Run(tmp_path / "run").events(0))
    assert found.total == pytest.approx(events[-1]["time"] - events[0]["time"])
    told = phalanx("why", "run", cwd=tmp_path)
    assert "goodput: " in told.stdout
