"""On Kubernetes: what kubectl is given fits its schemas, and runs in pods as their controllers would start them."""

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
import yaml

from phalanx import Run, WrongUse
from phalanx.launch.kubernetes import Kubernetes
from phalanx.launch.place import Command, place_of
from tests.hosts import Hosts, needs_namespaces
from tests.kubernetes import IMAGE, KubernetesCluster, needs_kubectl
from tests.test_recovery import TASK

KINDS = ("jobset", "job", "trainjob", "pytorchjob")
WORDS = ("slow.py", "--set", "precision=float64", "--layout", "dp=2", "--save-steps", "10", "--grace", "5")


def command_of(folder: Path, *words: str) -> Command:
    return Command("/usr/bin/python", ("gpt", *words), folder, folder / "run", "gpt-001", 30.0)


def place(text: str) -> Kubernetes:
    made = place_of(f"kubernetes:image={IMAGE},volume=runs,{text}")
    assert isinstance(made, Kubernetes)
    return made


def phalanx(cluster: KubernetesCluster, folder: Path, *words: str) -> subprocess.Popen[str]:
    variables = os.environ | cluster.environment | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "phalanx", *words]
    return subprocess.Popen(
        command, cwd=folder, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def told(cluster: KubernetesCluster, folder: Path, *words: str) -> tuple[int, str]:
    process = phalanx(cluster, folder, *words)
    out, _ = process.communicate(timeout=200)
    return process.returncode, out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "slow.py").write_text(TASK)
    return tmp_path


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(3, tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory, hosts: Hosts) -> Iterator[KubernetesCluster]:
    with KubernetesCluster(tmp_path_factory.mktemp("kubernetes"), hosts) as made:
        yield made


def on(kind: str, at: Path, /, nodes: int = 2, **more: str) -> str:
    options = {"image": IMAGE, "nodes": str(nodes), "kind": kind, "volume": f"runs:{at}", **more}
    return f"kubernetes:{','.join(f'{name}={value}' for name, value in options.items())}"


@needs_kubectl
@needs_namespaces
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_is_created_and_followed_to_its_end(cluster: KubernetesCluster, folder: Path, kind: str) -> None:
    more = {} if kind == "trainjob" else {"folder": str(folder)}
    task = str(folder / "slow.py")
    began = time.monotonic()
    code, said = told(
        cluster, folder, "train", task, *WORDS[1:], "--steps", "12", "--on", on(kind, folder, **more), "--run", "run"
    )
    print(time.monotonic() - began)
    assert code == 0, said
    for words in (" submit  ", "step 12/12", "certificate: 12 steps", "is done"):
        assert words in said
