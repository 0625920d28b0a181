"""A supervisor that ends with its worker, requests to stop that reach it, and events as metrics."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx import Run
from phalanx.launch.ray_worker import LAUNCHED, HostChild, HostJob, HostLost, StepNews, told
from tests.test_recovery import TASK


def job_in(folder: Path, *words: str) -> HostJob:
    return HostJob(words, str(folder), str(folder), str(folder))


def write(run: Run, *events: dict[str, object]) -> None:
    run.events_path(0).parent.mkdir(exist_ok=True)
    with run.events_path(0).open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def test_events_are_told_as_metrics_and_those_of_an_earlier_start_are_not(tmp_path: Path) -> None:
    run = Run(tmp_path)
    write(run, {"kind": "step", "step": 0, "loss": 3.0})
    news = StepNews(run)
    assert news.look() is None
    write(run, {"kind": "step", "step": 1, "loss": 2.0}, {"kind": "evaluation", "step": 2, "held_out": {"loss": 1.5}})
    assert news.look() == {"step": 2, "loss": 2.0, "held_out": {"loss": 1.5}}
    with run.events_path(0).open("a") as file:
        file.write('{"kind": "step", "step": 2, ')
    assert news.look() is None
    with run.events_path(0).open("a") as file:
        file.write('"loss": 1.0}\n')
    assert news.look() == {"step": 3, "loss": 1.0, "held_out": {"loss": 1.5}}


def test_the_last_step_is_told_although_all_is_over(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def over() -> bool:
        write(run, {"kind": "step", "step": 4, "loss": 1.0})
        return True

    assert list(told(run, over)) == [{"step": 5, "loss": 1.0}]


def test_the_first_who_asks_to_stop_says_why(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    assert job.asked_to_stop() is None
    job.output(1).write_text("one\ntwo\n")
    job.ask_to_stop(3, 1)
    job.ask_to_stop(130)
    assert job.asked_to_stop() == (3, "1")
    assert job.why() == "one\ntwo"


def test_a_child_gives_its_exit_code_and_knows_no_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHED:
        monkeypatch.setenv(name, "7")
    job = job_in(tmp_path, "train", "nothing.py", "--on", "local:1")
    assert HostChild(job).wait() == 2
    assert "nothing.py" in job.output(0).read_text()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    job = HostJob(("--version",), str(tmp_path / "away"), str(tmp_path), str(tmp_path))
    with pytest.raises(HostLost, match="away: No such file or directory"):
        HostChild(job)


def test_a_child_that_is_killed_is_lost(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(TASK)
    child = HostChild(job_in(tmp_path, "train", "slow.py", "--on", "local:1", "--set", "pause=1"))
    child.process.kill()
    with pytest.raises(HostLost, match="was ended by SIGKILL"):
        child.wait()


PARENT = """
import sys
from pathlib import Path
from phalanx.launch.ray_worker import HostChild, HostJob

here = str(Path.cwd())
child = HostChild(HostJob(("train", "slow.py", "--on", "local:2", "--set", "pause=0.05", "--steps", "9999",
    "--run", "run"), here, here, here))
print(child.process.pid, flush=True)
child.wait()
"""


def test_ranks_end_with_the_worker_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(TASK)
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child, run = int(parent.stdout.readline()), Run(tmp_path / "run")
    deadline = time.monotonic() + 60
    while not (run.events_path(1).exists() and list(run.events(1, "start"))):
        assert time.monotonic() < deadline, (tmp_path / "worker-0.out").read_text()
        time.sleep(0.1)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while _alive(child):
        assert time.monotonic() < deadline, "the supervisor outlives its worker"
        time.sleep(0.05)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
