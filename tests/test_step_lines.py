"""Steps in few bytes: at most 200 a rank and step after the first thousand, and all that is read is there."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from phalanx import Run, step_lines
from phalanx.events import EventLog
from phalanx.step_lines import EVERY, WHOLE, StepLines, filled
from phalanx.watch.page.table import RunTable

MOST_BYTES = 200


def facts(step: int, **more: Any) -> dict[str, Any]:
    draw = random.Random(step)
    return {
        "step": step, "loss": draw.uniform(1, 3), "losses": {}, "logged": {"accuracy": draw.random()},
        "grad_norm": draw.uniform(0.5, 2), "clip_factor": draw.random(), "lr": draw.random() / 1000, "count": 262_144,
        "slots": 64, "samples": f"{draw.getrandbits(64):016x}", "skipped": False, "bad": "",
        "seconds": {p: round(draw.random(), 6) for p in ("data", "forward", "wait", "backward", "reduce", "update")},
        "sent": {"fsdp": 4_758_120, "tp": 1_048_576}, "signals": [], "turn": "", **more,
    }  # fmt: skip


def numbers(step: int) -> dict[str, float]:
    draw = random.Random(-step)
    axes = [f"{what}_{axis}" for what in ("exposed", "overlapped") for axis in ("fsdp", "tp", "world")]
    names = [*axes, "checkpoint_seconds", "other_seconds", "tflops", "mfu"]
    return {name: round(draw.random(), 6) for name in names}


HELD = {f"memory_{part}": 12_345_678_901 for part in ("weights", "gradients", "optimizer", "activations", "other")}


def written(folder: Path, steps: int, **unusual: dict[str, Any]) -> Run:
    run = Run.create(folder, "x")
    for rank, shared in ((0, True), (1, False)):
        with EventLog(run, rank, shared=shared) as log:
            log.write("start", step=0)
            for step in range(steps):
                held = HELD if step % 500 == 0 else {}
                own = facts(step, **unusual.get(f"step_{step}", {}))
                log.step(own, numbers(step), held, last=step == steps - 1)
    return run


def test_a_rank_writes_at_most_200_bytes_a_step_after_the_first_thousand(tmp_path: Path) -> None:
    run = written(tmp_path / "one", WHOLE + 1000)
    for rank in range(2):
        lines = run.events_path(rank).read_bytes().splitlines(keepends=True)
        assert sum(map(len, lines[-1000:])) / 1000 <= MOST_BYTES


def test_every_step_is_read_whole(tmp_path: Path) -> None:
    steps = WHOLE + 3 * EVERY
    bad = WHOLE + EVERY + 7
    run = written(tmp_path / "one", steps, **{f"step_{bad}": {"skipped": True, "bad": "the loss is nan"}})
    ledger = run.ledger()
    assert list(ledger) == list(range(steps))
    for step, event in ledger.items():
        assert event.keys() >= facts(step).keys()
        assert (event["loss"], event["samples"]) == (facts(step)["loss"], facts(step)["samples"])
        assert event["grad_norm"] == pytest.approx(facts(step)["grad_norm"], rel=1e-5)
        assert (event["skipped"], event["bad"]) == ((True, "the loss is nan") if step == bad else (False, ""))
    assert not run.ledger(1)
    last = run.last_step()
    assert last is not None
    assert last["step"] == steps - 1


def test_means_are_of_the_steps_that_they_stand_for(tmp_path: Path) -> None:
    run = written(tmp_path / "one", WHOLE + 2 * EVERY)
    raw = [json.loads(line) for line in run.events_path(0).read_text().splitlines()]
    means = [event for event in raw if event.get("of", 0) > 1]
    assert sum(event["of"] for event in means) == 2 * EVERY
    first = means[0]
    steps = range(first["step"] + 1 - first["of"], first["step"] + 1)
    for phase, value in first["seconds"].items():
        assert value == pytest.approx(sum(facts(step)["seconds"][phase] for step in steps) / len(steps), rel=1e-4)
    assert first["mfu"] == pytest.approx(sum(numbers(step)["mfu"] for step in steps) / len(steps), rel=1e-4)


def test_charts_have_every_loss_and_no_gaps(tmp_path: Path) -> None:
    steps = WHOLE + 2 * EVERY
    table = RunTable(written(tmp_path / "one", steps))
    table.refresh()
    assert table.steps == steps
    assert table.shared["loss"].values[0].tolist() == pytest.approx([facts(step)["loss"] for step in range(steps)])
    for name in ("lr", "mfu", "logged/accuracy"):
        assert not (table.shared[name].values != table.shared[name].values).any()
    forward = table.seconds["forward"].values
    assert forward.shape == (2, steps)
    assert forward[1].tolist() == pytest.approx([facts(step)["seconds"]["forward"] for step in range(steps)], rel=1e-3)
    assert forward[0, -EVERY:].mean() == pytest.approx(forward[1, -EVERY:].mean(), rel=1e-3)
    assert "of" not in table.shared


def test_who_goes_on_late_begins_with_a_whole_line() -> None:
    lines = StepLines(shared=True)
    assert lines.of(1.0, facts(5000), {}, {})["sent"]
    assert "sent" not in lines.of(1.0, facts(5001), {}, {})


def test_other_events_and_old_steps_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [{"kind": "start", "step": 0}, {"kind": "step", "step": 0, "loss": 1.0}, {"kind": "end"}]
    assert list(filled(events)) == events
    assert step_lines.WHOLE == 1000
