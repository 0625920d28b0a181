"""Following a run: its checkpoints are evaluated until nobody trains it."""

from __future__ import annotations

import json
from pathlib import Path

from phalanx.train.evaluating import Evaluator
from phalanx.train.following_checkpoints import follow
from tests.test_cli import GOOD, phalanx, run_forked


def _follow(run: Path) -> None:
    found = follow(Evaluator.of(run, layout="dp=1", device="cpu"))
    assert [each.step for each in found] == [2]


def test_following_a_run_that_has_ended_evaluates_its_last_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(GOOD)
    done = phalanx("train", "task.py", "--run", "run", "--steps", "2", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = run_forked(_follow, tmp_path / "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "evaluated after step 2: accuracy" in done.stdout
    (line,) = (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 2
