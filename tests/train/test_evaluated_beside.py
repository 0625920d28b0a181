"""An evaluation beside training: every measure in the run's folder, and no harm to the run if it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx import Run, WrongUse
from phalanx.train.evaluated_beside import check
from tests.test_cli import GOOD, phalanx

WORDS = ["train", "task.py", "--run", "run", "--steps", "6", "--save-steps", "2", "--device", "cpu"]

BROKEN = """

@dataclass
class Broken(Digits):
    def evaluate(self, output, batch):
        import sys

        if "--follow" in sys.argv:
            raise RuntimeError("no measure today")
        return super().evaluate(output, batch)
"""


def test_checkpoints_are_evaluated_to_the_last(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(GOOD)
    done = phalanx(*WORDS, "--evaluate-on", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    (end,) = Run(tmp_path / "run").events(0, "end")
    assert last["step"] == 6
    assert last["held_out"] == pytest.approx(end["held_out"], rel=1e-5)


def test_a_failure_of_it_is_told_and_the_run_comes_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(GOOD + BROKEN)
    words = ["task.py:Broken" if word == "task.py" else word for word in WORDS]
    done = phalanx(*words, "--evaluate-on", "cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert Run(tmp_path / "run").certified_steps() == 6
    assert "the evaluation beside training has ended, and the run goes on" in done.stderr
    assert "no measure today" in done.stderr
    assert "the evaluation beside training ended with exit code 3" in done.stdout


def test_what_is_no_device_is_refused() -> None:
    for word in ("cpu", "cuda", "cuda:3"):
        check(word)
    for word in ("gpu", "cuda:", "cpu:1", "local:2"):
        with pytest.raises(WrongUse, match="is no device"):
            check(word)
