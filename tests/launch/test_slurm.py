"""On a real Slurm: submitted, followed, cancelled; the same bits after preemption, a time limit, a lost node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx import Run, WrongUse
from phalanx.launch import slurm
from phalanx.launch.place import Command, place_of
from tests.slurm import SlurmCluster, needs_slurm, until
from tests.test_recovery import TASK

PROCESSES: list[subprocess.Popen[str]] = []
WORDS = ("slow.py", "--set", "precision=float64", "--layout", "dp=2", "--save-steps", "10", "--grace", "5")


def command_of(folder: Path, *words: str) -> Command:
    return Command("python", ("gpt", *words), folder, folder / "run", "gpt-001", 30.0)


def test_a_job_script_says_what_is_asked_for(tmp_path: Path) -> None:
    made = place_of("slurm:nodes=4,gpus=8,partition=a100,time=1-00:00:00,account=me,exclusive")
    assert made is not None
    assert (made.nodes, made.ranks) == (4, 8)
    script = made.preview(command_of(tmp_path, "--set", "name=it's"))
    for line in (
        "--nodes=4", "--gpus-per-node=8", "--ntasks-per-node=1", "--partition=a100", "--time=1-00:00:00",
        "--account=me", "--exclusive", "--requeue", "--signal=B:USR1@90",
    ):  # fmt: skip
        assert f"#SBATCH {line}\n" in script
    assert "srun --nodes=4" in script
    assert """--set 'name=it'"'"'s' --run""" in script
    assert "--on local:8 --resume &" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_tasks_of_an_array_have_runs_of_their_own(tmp_path: Path) -> None:
    made = place_of("slurm:array=0-3,dependency=afterok:12:13")
    assert made is not None
    script = made.preview(command_of(tmp_path, "--set", "seed=%a"))
    assert "#SBATCH --array=0-3\n#SBATCH --dependency=afterok:12:13\n" in script
    assert 'seed="$SLURM_ARRAY_TASK_ID"' in script
    assert f'--run {tmp_path}/run-"$SLURM_ARRAY_TASK_ID" --on' in script


def test_a_short_job_is_told_in_time_to_do_something() -> None:
    assert [slurm.seconds(text) for text in ("5", "5:30", "1:00:00", "2-1", "1-0:30", "", "soon")] == [
        300, 330, 3600, 176400, 88200, 0, 0,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("on", "told"),
    [
        ("slurm:nodes=0", "nodes=0 is no number of 1 or more"),
        ("slurm:nodes=two", "nodes=two is no number"),
        ("slurm:output=/tmp/x", "output is not to be set there"),
        ("slurm:Nodes=2", "Nodes is not to be set there"),
        ("slum:nodes=2", "did you mean 'slurm'"),
    ],
)
def test_what_cannot_be_meant_is_refused(on: str, told: str) -> None:
    with pytest.raises(WrongUse, match=told):
        place_of(on)


def test_secrets_are_not_written_into_a_job(tmp_path: Path) -> None:
    for words in (("--checkpoints", "sftp://me:password@host/x"), ("--set", "api_key=abcdef")):
        with pytest.raises(WrongUse, match="has a secret, which would be written into the job"):
            command_of(tmp_path, *words)
    command_of(tmp_path, "--set", "tokenizer=mine", "--set", "keys=4", "--checkpoints", "s3://mine/x")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "slow.py").write_text(TASK)
    return tmp_path


@pytest.fixture(autouse=True)
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes of a test that must end with it."""
    yield PROCESSES
    for process in PROCESSES:
        if process.poll() is None:
            process.kill()
            process.communicate()
    PROCESSES.clear()


class Submitted:
    """``phalanx train`` that follows a job."""

    def __init__(self, cluster: SlurmCluster, folder: Path, *words: str, on: str = "slurm:nodes=2") -> None:
        self.cluster, self.folder, self.run = cluster, folder, Run(folder / "run")
        self.process = phalanx(cluster, folder, "train", *WORDS, "--on", on, "--run", "run", *words)

    @property
    def job(self) -> str:
        return json.loads((self.run.path / "place.json").read_text())["job"]

    def until(self, step: int, seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not (self.run.events_path(0).exists() and any(e["step"] >= step for e in self.run.events(0, "step"))):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, f"no step {step}: {self.cluster.told('squeue')}"
            time.sleep(0.2)

    def ended(self) -> tuple[int, str]:
        out, err = self.process.communicate(timeout=300)
        return self.process.returncode, out + err


def phalanx(cluster: SlurmCluster, folder: Path, *words: str) -> subprocess.Popen[str]:
    variables = os.environ | cluster.environment | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "phalanx", *words]
    process = subprocess.Popen(
        command, cwd=folder, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    PROCESSES.append(process)
    return process


def weights(folder: Path, name: str) -> str:
    return json.loads((folder / name / "final" / "certificate.json").read_text())["hash"]


def alone(cluster: SlurmCluster, folder: Path, *words: str) -> str:
    """The weights of the same run on this machine, left alone."""
    process = phalanx(cluster, folder, "train", *WORDS, *words, "--on", "local:2", "--run", "alone")
    assert process.wait(timeout=120) == 0, process.communicate()
    process.communicate()
    return weights(folder, "alone")


@needs_slurm
def test_a_job_is_submitted_and_followed_and_ends_with_the_same_bits(cluster: SlurmCluster, folder: Path) -> None:
    submitted = Submitted(cluster, folder, "--steps", "20")
    code, said = submitted.ended()
    assert code == 0, said
    for words in ("submit  Slurm job", "step 20/20", "certificate: 20 steps", "slurm job", "is done"):
        assert words in said
    assert weights(folder, "run") == alone(cluster, folder, "--steps", "20")
    for verb, words in (("status", "run: done"), ("logs", "step 20/20"), ("cancel", "is done already")):
        process = phalanx(cluster, folder, verb, "run")
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert words in out


@needs_slurm
def test_who_looks_away_looks_again_and_cancels(cluster: SlurmCluster, folder: Path) -> None:
    submitted = Submitted(cluster, folder, "--steps", "2000", "--set", "pause=0.05")
    submitted.until(3)
    submitted.process.send_signal(2)
    code, said = submitted.ended()
    assert code == 130
    assert "no longer followed" in said
    assert "RUNNING on n[1-2]" in phalanx(cluster, folder, "status", "run").communicate(timeout=60)[0]
    follower = phalanx(cluster, folder, "logs", "run", "--follow")
    cancelled = phalanx(cluster, folder, "cancel", "run")
    assert "ranks save what they have done" in cancelled.communicate(timeout=60)[0]
    out, err = follower.communicate(timeout=120)
    assert "saved up to step" in out, out + err
    assert follower.returncode == 130, out + err
    assert "ended" in phalanx(cluster, folder, "status", "run").communicate(timeout=60)[0]


@needs_slurm
def test_a_partition_that_is_not_there_is_named_with_those_that_are(cluster: SlurmCluster, folder: Path) -> None:
    code, said = Submitted(cluster, folder, on="slurm:nodes=2,partition=gpu").ended()
    assert code == 3
    assert "Invalid partition name" in said
    assert "Choose partition= of: main, urgent." in said
    assert not (folder / "run").exists()


@needs_slurm
def test_a_job_that_cannot_work_is_withdrawn(cluster: SlurmCluster, folder: Path) -> None:
    code, said = Submitted(cluster, folder, "--set", "wdith=3").ended()
    assert code == 2
    assert "did you mean" in said or "no field 'wdith'" in said
    assert not (folder / "run").exists()
    until(lambda: not cluster.told("squeue", "-h", "-t", "PD,R").strip())


@needs_slurm
def test_a_job_that_is_preempted_goes_on_where_it_was(cluster: SlurmCluster, folder: Path) -> None:
    submitted = Submitted(cluster, folder, "--steps", "200", "--set", "pause=0.03")
    submitted.until(12)
    urgent = cluster.told(
        "sbatch", "--parsable", "-p", "urgent", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 3"
    )
    assert urgent.strip()
    code, said = submitted.ended()
    assert code == 0, said
    assert len(list(submitted.run.events(0, "start"))) == 2
    assert weights(folder, "run") == alone(cluster, folder, "--steps", "200")


@needs_slurm
def test_a_job_whose_time_is_over_queues_up_again(cluster: SlurmCluster, folder: Path) -> None:
    submitted = Submitted(cluster, folder, "--steps", "1500", "--set", "pause=0.05", on="slurm:nodes=2,time=2")
    code, said = submitted.ended()
    assert code == 0, said
    assert "queues up again" in said
    assert len(list(submitted.run.events(0, "start"))) >= 2
    assert weights(folder, "run") == alone(cluster, folder, "--steps", "1500", "--set", "pause=0")


@needs_slurm
def test_a_job_that_loses_a_node_goes_on_when_there_is_another(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "cluster").mkdir()
    with SlurmCluster(tmp_path / "cluster") as cluster:
        submitted = Submitted(cluster, folder, "--steps", "300", "--set", "pause=0.03")
        submitted.until(25)
        cluster.lose("n2")
        until(lambda: "JobState=PENDING" in cluster.told("scontrol", "show", "job", submitted.job))
        cluster.start("n2")
        code, said = submitted.ended()
        assert code == 0, said
        assert weights(folder, "run") == alone(cluster, folder, "--steps", "300", "--set", "pause=0")
