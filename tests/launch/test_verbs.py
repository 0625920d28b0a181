"""The verbs about runs, as they are called."""

from __future__ import annotations

import json
from pathlib import Path

from phalanx import Run
from tests.test_cli import phalanx


def test_a_folder_without_runs(tmp_path: Path) -> None:
    assert phalanx("runs", cwd=tmp_path).stdout == "there are no runs in runs\n"
    assert phalanx("runs", "--json", cwd=tmp_path).stdout == ""
    for verb in ("status", "logs"):
        done = phalanx(verb, cwd=tmp_path)
        assert done.returncode == 2
        assert "there is no run under runs/ here" in done.stderr


def test_a_run_that_was_stopped_before_its_first_step(tmp_path: Path) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    Run(tmp_path / "runs" / "a").write_settings({"run": {"task": "gpt", "layout": "dp=2"}, "settings": {"steps": 7}})
    assert phalanx("status", cwd=tmp_path).stdout == "runs/a: stopped\ngpt on dp=2: step 0 of 7\n"
    assert json.loads(phalanx("status", "runs/a", "--json", cwd=tmp_path).stdout)["planned"] == 7
    assert phalanx("logs", "runs/a", cwd=tmp_path).stdout == "runs/a: stopped\n"
    assert phalanx("cancel", "runs/a", cwd=tmp_path).stdout == "runs/a is stopped already\n"
