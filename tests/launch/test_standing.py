"""How runs stand: told from their folders, those that run, are done, were stopped; and a run here is cancelled."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx import CannotHere, Run, WrongUse
from phalanx.launch import place, standing
from phalanx.launch.standing import Standing
from phalanx.run import held
from phalanx.watch.why import why
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


SLEEPS = "import signal; print(1, flush=True); signal.pause()"


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this user's that has nothing to do with any run."""
    with subprocess.Popen([sys.executable, "-c", SLEEPS], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


@pytest.mark.parametrize("where", ["here", "hosts"])
def test_a_forged_lock_ends_nobody_else_s_process(
    tmp_path: Path, bystander: subprocess.Popen[bytes], where: str
) -> None:
    run = Run(tmp_path)
    run.write_settings({"run": {"task": "gpt"}})
    folder = run.path if where == "here" else run.path / "hosts"
    folder.mkdir(exist_ok=True)
    if where == "hosts":
        place.note(run, "hosts:n1", f"{bystander.pid}@{socket.gethostname()}")
    with held(folder):
        (folder / "lock").write_text(f"process {bystander.pid} on {socket.gethostname()}")
        with pytest.raises(CannotHere, match=rf"process {bystander.pid} does not hold .*end it yourself: kill"):
            standing.cancel(run)
    assert bystander.poll() is None


def test_a_forged_job_of_slurm_is_not_the_run_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "told"
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "srun", "scontrol", "scancel"):
        tool = tmp_path / "bin" / name
        tool.write_text(
            f"#!/bin/sh\necho {name} $* >> {told}\necho JobState=RUNNING NodeList=n StdOut=/home/me/12.out x"
        )
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    run = Run(tmp_path / "run")
    run.path.mkdir()
    place.note(run, "slurm", "12")
    assert Standing.of(run).state == "running"
    with pytest.raises(CannotHere, match=r"job 12 does not print to .*/run/slurm, .*end it yourself: scancel 12$"):
        standing.cancel(run)
    assert "scancel" not in told.read_text()
    (tmp_path / "bin" / "scontrol").write_text(
        f"#!/bin/sh\necho JobState=RUNNING NodeList=n StdOut={run.path.resolve()}/slurm/12.out x"
    )
    assert standing.cancel(run).startswith("asked slurm job 12 to end")
    assert "scancel --batch --signal=USR2 12" in told.read_text()


EVENTS = "events/rank-00000.jsonl"
CONTENTS = {"list": "[]", "text": '"x"', "number": "3", "nothing": "", "cut": '{"steps": 1', "odd": '{"steps": []}'}


def damage(run: Run, name: str, how: str) -> None:
    """Have a file of a run's be something else."""
    path = run.path / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if how == "pipe":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    elif how == "link":
        path.symlink_to("/etc/passwd")
    elif how == "huge":
        with path.open("wb") as file:
            file.truncate(1 << 36)
    else:
        path.write_text(CONTENTS[how])


@pytest.mark.parametrize("how", ["pipe", "folder", "link", "huge", *CONTENTS])
@pytest.mark.parametrize(
    "name", ["final/certificate.json", "run.toml", "place.json", "lock", "events/rank-00000.jsonl"]
)
def test_one_bad_folder_is_one_line_and_the_others_are_shown(tmp_path: Path, name: str, how: str) -> None:
    for run in (Run(tmp_path / "good"), Run(tmp_path / "bad")):
        run.path.mkdir()
        run.write_settings({"run": {"task": "gpt", "layout": "dp=1"}, "settings": {"steps": 5}})
    damage(Run(tmp_path / "bad"), name, how)
    began = time.monotonic()
    found = {Path(each.run).name: each for each in standing.listed(tmp_path)}
    assert (found["good"].state, found["good"].task, found["good"].planned) == ("stopped", "gpt", 5)
    harmless = name in ("lock", "events/rank-00000.jsonl") and how in CONTENTS
    if not (
        harmless or (name, how) in (("lock", "huge"), ("run.toml", "nothing"), ("events/rank-00000.jsonl", "huge"))
    ):
        assert found["bad"].state in ("unreadable", "unknown")
        assert name in found["bad"].where
    assert len(standing.table(list(found.values())).splitlines()) == 3
    assert time.monotonic() - began < 10
    for each in found.values():
        json.loads(each.to_json())


def test_what_is_printed_cannot_control_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    escape = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m\r\n"
    run = Run(tmp_path / "runs" / f"a{escape.strip()}")
    run.path.mkdir(parents=True)
    run.write_settings({"run": {"task": f"gpt{escape}", "layout": f"dp=1{escape}"}})
    (run.path / "events").mkdir()
    events = [
        {"kind": "failure", "time": 1.0, "reason": f"died{escape}"},
        {"kind": "step", "time": 1.0, "step": 1, "loss": 1.0, "samples": escape, "turn": escape},
        {"kind": f"odd{escape}", "time": 1.0, "why": {escape: escape}, "layout": escape},
    ]
    run.events_path(0).write_text("".join(f"{json.dumps(event)}\n" for event in events))
    (run.path / "lock").write_text(f"process 12 on {escape}")
    with held(run.path):
        (run.path / "lock").write_text(f"process{escape} 12 on {escape}")
        print(standing.table(standing.listed(tmp_path / "runs")))
        print(Standing.of(run))
        with pytest.raises(CannotHere) as refused:
            standing.cancel(run)
    print(standing.show_logs(run, keep_on=False))
    print(why(run))
    place.note(run, "slurm", "12")
    place.note(run, f"slurm:a={escape}", "12")
    print(Standing.of(run))
    told = capsys.readouterr().out
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", told)
    assert len(told.splitlines()) < 40
    assert "\\x1b]0;owned" in told
    assert "\x1b" in str(refused.value), "what is raised is escaped where it is printed"


def test_what_a_cell_holds_is_not_long(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.path.mkdir()
    run.write_settings({"run": {"task": "g" * 100_000, "layout": "d" * 100_000}})
    assert max(map(len, standing.table(standing.listed(tmp_path)).splitlines())) < 1000


def test_a_loss_that_is_no_number_is_listed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (tmp_path / "events").mkdir()
    for text in ('"nan"', "NaN", "Infinity", "1e999", '"-inf"'):
        run.events_path(0).write_text(f'{{"kind": "step", "time": 1.0, "step": 1, "loss": {text}}}\n')
        found = Standing.of(run)
        assert json.loads(found.to_json(), parse_constant=pytest.fail)["loss"] is None
        assert "loss" in str(found)
        assert standing.table([found])


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
