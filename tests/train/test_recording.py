"""What a rank notes of each step."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import phalanx
from phalanx import cli, step_lines
from phalanx.events import EventLog
from phalanx.run import Run
from phalanx.train.recording import StepRecording
from phalanx.watch.page.table import RunTable
from phalanx.watch.why import why
from tests.forking import fork
from tests.ranks import Ranks
from tests.tasks import Digits
from tests.test_recovery import TASK, ended


def shortly(words: list[str], cwd: Path) -> None:
    """The command, with short lines from the fifth step on."""
    step_lines.WHOLE, step_lines.EVERY = 4, 5
    os.chdir(cwd)
    sys.argv = ["phalanx", "train", *words]
    cli.main()


def test_a_run_of_short_lines_is_restarted_resumed_certified_and_explained(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(TASK)
    words = ["slow.py", "--layout", "dp=2", "--run", "one", "--set", "pause=0", "--memory-steps", "3"]
    for more in (["--steps", "18", "--kill", "1@13"], ["--steps", "24", "--resume"]):
        process = fork(shortly, [*words, *more], tmp_path)
        assert ended(process) == 0
    run = Run(tmp_path / "one")
    raw = run.events_path(0).read_text().splitlines()
    assert sum('"sent"' not in line for line in raw if line.startswith('{"kind": "step"')) > 10
    certificate = json.loads(run.certificate_path.read_text())
    assert (certificate["steps"], certificate["difference"]) == (24, 0.0)
    assert certificate["repeated"] > 0
    assert len(run.ledger()) == 24
    assert why(run).kind in ("nothing", "slow")
    table = RunTable(run)
    table.refresh()
    assert table.shared["loss"].values[0].tolist() == pytest.approx([event["loss"] for event in run.ledger().values()])


def recorded(folder: Path) -> list[dict]:
    with phalanx.Engine(Digits(steps=6), "dp=2", device="cpu") as engine:
        rank = engine.rank
        with EventLog(Run(folder), rank, shared=rank == 0) as log:
            recording = StepRecording(engine, log)
            for batch in engine.batches():
                with recording.checkpointing("here"):
                    pass
                recording.note(engine.step(batch))
        return list(Run(folder).events(rank, "step"))


def test_a_step_says_where_its_seconds_went_and_what_is_held(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2, recorded, tmp_path)
    for event in first[1:] + second[1:]:
        assert {"data", "forward", "backward", "update"} <= event["seconds"].keys()
        assert event["exposed_dp"] > 0
        assert event["overlapped_dp"] >= 0
        assert event["checkpoint_seconds"] >= 0
        assert event["other_seconds"] >= 0
    assert first[0]["memory_weights"] == second[0]["memory_weights"] > 0
    assert "loss" in first[0]
    assert "loss" not in second[0]
