"""How runs stand: told from their folders, those that run, are done, were stopped; and a run here is cancelled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx import CannotHere, Run, WrongUse
from phalanx.launch import standing
from phalanx.launch.standing import Standing
from tests.test_cli import phalanx
from tests.test_recovery import TASK


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "slow.py").write_text(TASK)
    return tmp_path


def until_first_steps(run: Run, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not run.path.exists() or not any(event["step"] >= 3 for event in run.events(0, "step")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_run_is_listed_and_cancelled_from_another_terminal(folder: Path) -> None:
    words = ("slow.py", "--on", "local:2", "--steps", "5000", "--set", "pause=0.02", "--device", "cpu")
    with subprocess.Popen(
        [sys.executable, "-m", "phalanx", "train", *words], cwd=folder, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True,
    ) as process:  # fmt: skip
        run = Run(folder / "runs" / "slow-001")
        try:
            until_first_steps(run, process)
            (found,) = [json.loads(line) for line in phalanx("runs", "--json", cwd=folder).stdout.splitlines()]
            assert (found["state"], found["planned"], found["run"]) == ("running", 5000, "runs/slow-001")
            assert found["where"].startswith(f"process {process.pid} on ")
            assert found["steps"] >= 3
            assert f"asked process {process.pid} to end" in phalanx("cancel", "runs/slow-001", cwd=folder).stdout
            assert process.wait(timeout=60) == 130
        finally:
            process.kill()
    told = phalanx("status", cwd=folder).stdout
    assert told.startswith("runs/slow-001: stopped\n")
    assert "slow.py on dp=2: step" in told
    assert "is stopped already" in phalanx("cancel", "runs/slow-001", cwd=folder).stdout
    logs = phalanx("logs", "runs/slow-001", cwd=folder).stdout
    assert "start 0  world 2  layout dp=2  generation 1" in logs
    assert "stopped" in logs


def test_a_run_that_is_done(folder: Path) -> None:
    assert phalanx("train", "slow.py", "--steps", "3", "--device", "cpu", "--run", "done", cwd=folder).returncode == 0
    found = Standing.of(Run(folder / "done"))
    assert (found.state, found.steps, found.planned) == ("done", 3, 3)
    assert found.loss is not None
    assert "done" in standing.table([found])


def test_a_run_of_another_host_is_not_ended_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    run.write_settings({"run": {"task": "gpt"}})
    monkeypatch.setattr("phalanx.run.socket.gethostname", lambda: "elsewhere")
    with run.held():
        monkeypatch.undo()
        with pytest.raises(CannotHere, match=r"not here\. Cancel it on elsewhere"):
            standing.cancel(run)


def test_what_is_no_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WrongUse, match="there is no run under runs/ here"):
        standing.run_at(None)
    with pytest.raises(WrongUse, match="is no run's folder"):
        standing.run_at(tmp_path)
    for name in ("mine", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        Run(tmp_path / "runs" / name).write_settings({"run": {"task": "gpt"}})
    for asked in ("nosuchrun", "runs/nosuchrun", "runs"):
        with pytest.raises(WrongUse, match=r"Give one that is there: runs/(mine|other), runs/(mine|other)\.$"):
            standing.run_at(Path(asked))


def test_the_newest_step_is_found_in_a_log_that_was_cut(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.events_path(0).parent.mkdir()
    step = json.dumps({"kind": "step", "time": time.time(), "step": 4, "loss": 1.5})
    run.events_path(0).write_text(f'{step}\n{{"kind": "end"}}\n{{"kind": "step", "st')
    found = Standing.of(run)
    assert (found.steps, found.loss, found.state) == (5, 1.5, "stopped")
