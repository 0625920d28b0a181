"""The doctor sent to a place: its hosts examine each other as a job, of which nothing is left where all is well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from phalanx.launch.place import Command
from tests.ray_nodes import needs_ray
from tests.slurm import SlurmCluster, needs_slurm
from tests.ssh import needs_ssh, ssh_hosts
from tests.test_cli import phalanx


def test_it_is_the_same_command_on_each_host(tmp_path: Path) -> None:
    command = Command("python", ("--device", "cpu"), tmp_path, tmp_path / "run", "doctor-001", 30.0, verb="doctor")
    assert " ".join(command.on(2)) == f"python -m phalanx doctor --device cpu --run {tmp_path}/run --on local:2"


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    done = phalanx("doctor", "--on", "slurm:nodes=2", "--run", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 2
    assert f"{tmp_path} is not empty. Give a new folder that all hosts see" in done.stderr
    assert (tmp_path / "mine").read_text() == "mine"


def check_fit(done: subprocess.CompletedProcess[str], folder: Path, on: str, hosts: int) -> None:
    assert done.returncode == 0, done
    for words in (f"torch {torch.__version__}", f"{hosts} ranks met, and each computed", f"{on} is fit to train on"):
        assert words in done.stdout
    assert not list(folder.glob("runs/*"))


def run_in(folder: Path, variables: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "phalanx", "doctor", *words]
    return subprocess.run(command, cwd=folder, env=os.environ | variables, capture_output=True, text=True, timeout=240)


@needs_slurm
@pytest.mark.every
def test_nodes_of_slurm(tmp_path: Path) -> None:
    with SlurmCluster(tmp_path) as cluster:
        check_fit(run_in(tmp_path, cluster.environment, "--on", "slurm:nodes=2"), tmp_path, "slurm:nodes=2", 2)


@needs_ray
@pytest.mark.every
def test_workers_of_ray(tmp_path: Path) -> None:
    check_fit(run_in(tmp_path, {}, "--on", "ray:ranks=2"), tmp_path, "ray:ranks=2", 2)


@needs_ssh
@pytest.mark.every
def test_hosts_over_ssh(tmp_path: Path) -> None:
    with ssh_hosts(tmp_path) as cluster:
        for on, code in (("hosts:node1,node2", 0), ("hosts:node1,node3", 3)):
            process = cluster.start("doctor", "--on", on)
            out, err = process.communicate(timeout=240)
            done = subprocess.CompletedProcess([], process.returncode, out, err)
            if code == 0:
                check_fit(done, tmp_path, on, 2)
                assert "links between hosts:" in out
            else:
                assert process.returncode == 3, done
                assert "node3: is not reached over ssh" in out + err
                assert not list(tmp_path.glob("runs/*"))
