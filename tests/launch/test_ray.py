"""On a real Ray: the same bits, also after a worker or a node is lost; asked to end; what cannot be, in one message."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx import Run, WrongUse
from phalanx.launch.place import ENDED, Command, place_of
from tests.ray_nodes import RayNodes, needs_ray, parent_of
from tests.test_recovery import TASK

WORDS = ("slow.py", "--set", "precision=float64", "--layout", "dp=2", "--save-steps", "10", "--grace", "10")


def test_what_would_be_started_is_shown(tmp_path: Path) -> None:
    made = place_of("ray:address=head:6379,nodes=4,gpus=8")
    assert made is not None
    assert (made.nodes, made.ranks, made.gpus) == (4, 8, 8)
    text = made.preview(Command("python", ("gpt",), tmp_path, tmp_path / "run", "gpt-001", 30.0))
    for words in (
        "ray.init(address='head:6379')", "num_workers=4", "resources_per_worker={'CPU': 8, 'GPU': 8}", "use_gpu=True",
        f"storage_path='{tmp_path}'", "--on local:8 --resume",
    ):  # fmt: skip
        assert words in text


@pytest.mark.parametrize(
    ("on", "told"),
    [
        ("ray:nodes=0", "nodes=0 is no number of 1 or more"),
        ("ray:workers=2", "'workers' is not one of its options"),
        ("ray:auto", "'auto' is not one of its options; did you mean 'auto'|address"),
    ],
)
def test_what_cannot_be_meant_is_refused(on: str, told: str) -> None:
    with pytest.raises(WrongUse, match=told):
        place_of(on)


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with RayNodes() as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "slow.py").write_text(TASK)
    return tmp_path


def phalanx(folder: Path, *words: str) -> subprocess.Popen[str]:
    return started(folder, "-m", "phalanx", *words)


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words], cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out + err


def train(folder: Path, on: str, *words: str, run: str = "run") -> subprocess.Popen[str]:
    return phalanx(folder, "train", *WORDS, "--on", on, "--run", run, *words)


def until(run: Run, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 200
    while not (run.events_path(0).exists() and any(event["step"] >= step for event in run.events(0, "step"))):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"no step {step}"
        time.sleep(0.2)


def weights(folder: Path, name: str) -> str:
    return json.loads((folder / name / "final" / "certificate.json").read_text())["hash"]


def alone(folder: Path, *words: str) -> str:
    """The weights of the same run without Ray, left alone."""
    code, said = ended(train(folder, "local:2", *words, run="alone"))
    assert code == 0, said
    return weights(folder, "alone")


def supervisor(run: Run) -> int:
    """The process of the first host's, a child of a worker of Ray's."""
    found = re.match(r"process (\d+)", (run.path / "lock").read_text())
    assert found is not None
    return int(found[1])


@needs_ray
def test_a_run_on_two_nodes_ends_with_the_same_bits(nodes: RayNodes, folder: Path) -> None:
    code, said = ended(train(folder, f"ray:address={nodes.address},nodes=2", "--steps", "20"))
    assert code == 0, said
    for words in ("submit  Ray job 1: 2 workers of 1 CPU", "step 20/20", "certificate: 20 steps", "ray job 1 is done"):
        assert words in said
    assert weights(folder, "run") == alone(folder, "--steps", "20")
    for verb, words in (("status", "run: done"), ("logs", "step 20/20"), ("cancel", "is done already")):
        code, said = ended(phalanx(folder, verb, "run"))
        assert code == 0, said
        assert words in said


@needs_ray
def test_a_worker_that_is_killed_is_started_again(nodes: RayNodes, folder: Path) -> None:
    on = f"ray:address={nodes.address},nodes=2"
    process, run = train(folder, on, "--steps", "100", "--set", "pause=0.03"), Run(folder / "run")
    until(run, 25, process)
    os.kill(parent_of(supervisor(run)), signal.SIGKILL)
    code, said = ended(process)
    assert code == 0, said
    assert re.search(r"again  worker \d was lost: .*; Ray starts all of them again", said), said
    assert len(list(run.events(0, "start"))) == 2
    assert weights(folder, "run") == alone(folder, "--steps", "100", "--set", "pause=0")


@needs_ray
def test_a_node_that_is_lost_is_waited_for(nodes: RayNodes, folder: Path) -> None:
    on = f"ray:address={nodes.address},nodes=2"
    process, run = train(folder, on, "--steps", "100", "--set", "pause=0.03"), Run(folder / "run")
    until(run, 25, process)
    nodes.lose()
    time.sleep(3)
    nodes.add()
    code, said = ended(process)
    assert code == 0, said
    assert len(list(run.events(0, "start"))) >= 2
    assert weights(folder, "run") == alone(folder, "--steps", "100", "--set", "pause=0")


@needs_ray
def test_who_cancels_keeps_what_was_done(nodes: RayNodes, folder: Path) -> None:
    on = f"ray:address={nodes.address},nodes=2"
    process, run = train(folder, on, "--steps", "2000", "--set", "pause=0.05"), Run(folder / "run")
    until(run, 3, process)
    assert "run: running" in ended(phalanx(folder, "status", "run"))[1]
    assert "ranks save what they have done" in ended(phalanx(folder, "cancel", "run"))[1]
    code, said = ended(process)
    assert code == 130, said
    assert "saved up to step" in said
    made = place_of(on)
    assert made is not None
    assert (made.status(run, "1").state, made.status(run, "1").code) == (ENDED, 130)


@needs_ray
def test_ctrl_c_ends_a_cluster_of_our_own_too(folder: Path) -> None:
    process, run = train(folder, "ray:ranks=2", "--steps", "2000", "--set", "pause=0.05"), Run(folder / "run")
    until(run, 3, process)
    process.send_signal(signal.SIGINT)
    code, said = ended(process)
    assert code == 130, said
    assert "was asked to: ranks save what they have done and end" in said
    assert "saved up to step" in said
    assert not [line for line in said.splitlines() if "Traceback" in line or "Warning" in line or "ray::" in line]


@needs_ray
@pytest.mark.parametrize(
    ("on", "told"),
    [
        ("address={address},nodes=3", "asks for 3 workers of 1 CPU each, and the cluster has room for 2"),
        ("address={address},gpus=1", "1 worker of 1 CPU and 1 GPU each, and the cluster has room for 0"),
        ("address=127.0.0.1:1", "nobody answers at address=127.0.0.1:1: Connection refused"),
        ("address=there", "address=there is not auto, HOST:PORT or ray://HOST:PORT"),
    ],
)
def test_what_would_wait_for_ever_is_refused(nodes: RayNodes, folder: Path, on: str, told: str) -> None:
    on = on.format(address=nodes.address)
    code, said = ended(phalanx(folder, "train", "slow.py", "--on", f"ray:{on}", "--run", "run"))
    assert code in (2, 3)
    assert told in said
    assert len(said.strip().splitlines()) == 1, said
    assert not (folder / "run").exists()


@needs_ray
def test_a_task_that_is_refused_is_not_started_again(nodes: RayNodes, folder: Path) -> None:
    on = f"ray:address={nodes.address},nodes=2"
    process = phalanx(folder, "train", "slow.py", "--on", on, "--run", "run", "--init-from", "nothing/there")
    code, said = ended(process)
    assert code in (2, 3), said
    assert "Ray starts all of them again" not in said


FIT = """
import json
import ray
from phalanx.launch.ray import trainer

ray.init(address="{address}", log_to_driver=False)
result = trainer("slow.py", run="run", layout="dp=2", nodes=2, steps=20, settings={{"precision": "float64"}}).fit()
print(json.dumps([result.metrics, result.path, result.checkpoint.path]))
"""
TUNE = """
import json
import ray
from ray import tune
from phalanx.launch.ray import trainable

ray.init(address="{address}", log_to_driver=False)
tuned = tune.Tuner(
    trainable("slow.py", steps=5),
    param_space={{"pause": tune.grid_search([0.0, 0.01])}},
    run_config=tune.RunConfig(storage_path="{folder}/tuned", name="slow", verbose=0),
).fit()
print(json.dumps([[each.config["pause"], each.metrics["step"], str(each.error)] for each in tuned]))
"""


def printed(folder: Path, nodes: RayNodes, script: str) -> object:
    """The last line of what a script prints."""
    (folder / "script.py").write_text(script.format(address=nodes.address, folder=folder))
    process = started(folder, "script.py")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    return json.loads(out.strip().splitlines()[-1])


@needs_ray
def test_from_python_there_is_a_result(nodes: RayNodes, folder: Path) -> None:
    found = printed(folder, nodes, FIT)
    last = list(Run(folder / "run").events(0, "step"))[-1]
    assert found == [{"step": 20, "loss": last["loss"]}, str(folder / "run"), str(folder / "run" / "final")]


@needs_ray
def test_a_task_is_tuned(nodes: RayNodes, folder: Path) -> None:
    assert printed(folder, nodes, TUNE) == [[0.0, 5, "None"], [0.01, 5, "None"]]
