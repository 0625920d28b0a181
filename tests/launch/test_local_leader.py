"""Processes that others start, one a rank: the first leads, the others wait; the bits are the same as of ours."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx import CannotHere
from phalanx.launch import local_leader
from phalanx.launch.local_leader import led
from phalanx.launch.started import Started
from tests.forking import fork
from tests.launch.test_slurm import weights
from tests.test_cli import phalanx
from tests.test_recovery import TASK

WORDS = ("slow.py", "--steps", "8", "--kill", "1@4", "--device", "cpu")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
OPEN_MPI = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2")


def started(local: int, of: int, job: str) -> Started:
    return Started("torchrun", job, of, local, of, local, 1)


def _process(local: int, of: int, job: str, cores: set[int], out: Path) -> None:
    os.sched_setaffinity(0, cores)
    with led(started(local, of, job), "cpu") as found:
        assert found is not None
        out.write_text(f"{found.local} {len(os.sched_getaffinity(0))}")
        raise SystemExit(7)


def test_one_leads_with_the_cores_of_all_and_the_others_end_as_it_ends(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    job = f"test {os.getpid()}"
    processes = [
        fork(_process, local, 3, job, {cores[local % len(cores)]}, tmp_path / f"{local}") for local in (2, 1, 0)
    ]
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 7
        process.close()
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    assert (tmp_path / "0").read_text() == f"0 {min(3, len(cores))}"


def _leads_and_dies(job: str) -> None:
    with led(started(0, 2, job), "cpu"):
        os._exit(9)


def _follows(job: str) -> None:
    with led(started(1, 2, job), "cpu"):
        raise SystemExit(0)


def test_a_leader_that_is_killed_leaves_nobody_waiting() -> None:
    job = f"dies {os.getpid()}"
    follower, leader = fork(_follows, job), fork(_leads_and_dies, job)
    for process, code in ((follower, 1), (leader, 9)):
        process.join(timeout=60)
        assert process.exitcode == code
        process.close()


def test_who_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_leader, "PATIENCE_SECONDS", 0.2)
    with (
        pytest.raises(CannotHere, match=r"3 processes on this host, and number 1, 2 did not come"),
        led(started(0, 3, f"alone {os.getpid()}"), "cpu"),
    ):
        pass


def _as_another_user(place: str, out: Path) -> None:
    file = out.open("w", buffering=1)
    os.setuid(4242)
    with file, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        while line.connect_ex(place):
            time.sleep(0.01)
        line.settimeout(20)
        try:
            line.send(json.dumps({"number": 1, "cores": []}).encode())
            file.write(repr(line.recv(1)))
        except (ConnectionResetError, BrokenPipeError):  # it was closed before all was read
            file.write(repr(b""))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_another_users_process_is_not_let_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = started(0, 2, f"another user {os.getpid()}")
    monkeypatch.setattr(local_leader, "PATIENCE_SECONDS", 2.0)
    other = fork(_as_another_user, local_leader._place(own), tmp_path / "out")
    with pytest.raises(CannotHere, match="number 1 did not come"), led(own, "cpu"):
        pass
    other.join()
    assert (tmp_path / "out").read_text() == "b''", "its connection was closed, and nothing told"


def test_a_job_of_the_same_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_leader, "PATIENCE_SECONDS", 5)
    job = f"twice {os.getpid()}"
    other = fork(_waits, job)
    time.sleep(0.5)
    with (
        pytest.raises(CannotHere, match="another job that torchrun started under the same name"),
        led(started(0, 2, job), "cpu"),
    ):
        pass
    other.kill()
    other.join()
    other.close()


def _waits(job: str) -> None:
    with led(started(0, 2, job), "cpu"):
        pass


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param((*TORCHRUN, "-m", "--"), id="torchrun"),
        pytest.param((*OPEN_MPI, sys.executable, "-m"), id="Open MPI"),
        pytest.param(("mpirun.mpich", "-n", "2", sys.executable, "-m"), id="MPICH"),
    ],
)  # fmt: skip
def test_a_rank_is_lost_under_another_launcher_and_the_bits_are_the_same(
    tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    if shutil.which(launcher[0]) is None:
        pytest.skip(f"{launcher[0]} is not installed (Debian: openmpi-bin, mpich)")
    (tmp_path / "slow.py").write_text(TASK)
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [*launcher, "phalanx", "train", *WORDS, "--run", "theirs"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ranks were started again once" in done.stdout
    ours = phalanx("train", *WORDS[:3], "--device", "cpu", "--on", "local:2", "--run", "ours", cwd=tmp_path)
    assert ours.returncode == 0, ours.stderr
    assert weights(tmp_path, "theirs") == weights(tmp_path, "ours")
