"""Who started a process: read off the variables that launchers set, and what follows for `phalanx train`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from phalanx import CannotHere, WrongUse
from phalanx.launch.started import PORTS, Started
from tests.hosts import Hosts, needs_namespaces
from tests.launch.test_slurm import weights
from tests.test_cli import phalanx
from tests.test_hosts import _main, ended
from tests.test_recovery import TASK

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500",
}  # fmt: skip
SRUN = {
    "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "17", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)", "SLURM_STEP_NODELIST": "gpu[07-09]", "SLURMD_NODENAME": "gpu08",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_orte_num_nodes": "2", "PMIX_NAMESPACE": "387710977",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
JSRUN = {
    "JSM_NAMESPACE_RANK": "6", "JSM_NAMESPACE_SIZE": "12", "JSM_NAMESPACE_LOCAL_RANK": "0",
    "JSM_NAMESPACE_LOCAL_SIZE": "6", "LSB_JOBID": "9", "LSB_MCPU_HOSTS": "c01 6 c02 6",
}  # fmt: skip
SAGEMAKER = {"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "8"}
SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_NUM_NODES": "2",
}  # fmt: skip
VERTEX = {
    "CLUSTER_SPEC": json.dumps(
        {
            "cluster": {"workerpool0": ["a-0:2222"], "workerpool1": ["b-0:2222", "b-1:2222"]},
            "task": {"type": "workerpool1", "index": 1},
        }
    )
}
KUBEFLOW = {"PET_NNODES": "1:3", "PET_NODE_RANK": "2", "PET_NPROC_PER_NODE": "4", "PET_MASTER_ADDR": "job-node-0-0.job"}
AZURE_ML = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "6105",
    "NODE_RANK": "1", "AZUREML_PROCESS_COUNT_PER_NODE": "2",
}  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "by", "process", "local", "hosts", "first", "ranks"),
    [
        (TORCHRUN, "torchrun", (5, 8), (1, 4), 2, "node1", 0),
        (SRUN, "srun", (2, 4), (0, 1), 3, "gpu07", 0),
        (OPEN_MPI, "Open MPI", (3, 4), (1, 2), 2, "", 0),
        (OPEN_MPI | {"AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}, "Open MPI", (3, 4), (1, 2), 2, "10.0.0.4", 0),
        (OPEN_MPI | SRUN | {"SLURM_JOB_NODELIST": "n[1,3]"}, "Open MPI", (3, 4), (1, 2), 2, "n1", 0),
        (MPICH, "MPICH", (1, 2), (1, 2), 1, "", 0),
        (JSRUN, "jsrun", (6, 12), (0, 6), 2, "c01", 0),
        (SAGEMAKER, "SageMaker", (1, 2), (0, 1), 2, "algo-1", 8),
        (SKYPILOT, "SkyPilot", (1, 2), (0, 1), 2, "10.0.0.1", 8),
        (VERTEX, "Vertex AI", (2, 3), (0, 1), 3, "a-0", 0),
        (KUBEFLOW, "Kubeflow", (2, 3), (0, 1), 3, "job-node-0-0.job", 4),
        (AZURE_ML, "RANK and WORLD_SIZE", (3, 4), (1, 2), 2, "10.0.0.4", 0),
    ],
)
def test_who_started_it(
    variables: dict[str, str], by: str, process: tuple[int, int], local: tuple[int, int], hosts: int, first: str,
    ranks: int,
) -> None:  # fmt: skip
    found = Started.detect(variables)
    assert found is not None
    assert (found.by, found.process, found.processes) == (by, *process)
    assert (found.local, found.local_processes) == local
    assert (found.hosts, found.first, found.ranks) == (hosts, first, ranks)
    assert found.port in PORTS


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_JOB_ID": "3", "SLURM_PROCID": "0", "SLURM_NODEID": "0"},  # in the script of a batch job
        SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0"},  # in the shell of srun
        {"RANK": "0"},
    ],
)
def test_a_process_that_is_alone(variables: dict[str, str]) -> None:
    assert Started.detect(variables) is None


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        (TORCHRUN | {"RANK": "8"}, "process 8 of 8, .* which cannot be"),
        (TORCHRUN | {"LOCAL_RANK": "x"}, "LOCAL_RANK=x is no number"),
        (SAGEMAKER | {"SM_HOSTS": "algo-1"}, "SM_HOSTS is not JSON"),
        (SAGEMAKER | {"SM_CURRENT_HOST": "algo-3"}, "does not list this host, algo-3, among algo-1, algo-2"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "Set LOCAL_WORLD_SIZE too"),
    ],
)
def test_variables_that_cannot_be_meant_are_refused(variables: dict[str, str], told: str) -> None:
    with pytest.raises(CannotHere, match=told):
        Started.detect(variables)


def given(**options: Any) -> dict[str, Any]:
    return dict.fromkeys(("task", "on", "layout", "run", "meet", "min_nodes", "max_nodes", "host")) | options


def test_what_follows_for_training() -> None:
    found = Started.detect(SRUN)
    assert found is not None
    over = found.over(given(task="mine.py:Mine"))
    assert (over["on"], over["max_nodes"], over["min_nodes"], over["host"]) == ("local:1", 3, 3, "gpu08")
    assert over["meet"] == f"gpu07:{found.port}"
    assert over["run"] == Path("runs/mine-slurm-17")
    kept = found.over(given(task="gpt", on="local:8", min_nodes=1, meet="gpu09:29400", run=Path("mine")))
    assert (kept["on"], kept["min_nodes"], kept["meet"], kept["run"]) == ("local:8", 1, "gpu09:29400", Path("mine"))


def test_ranks_are_the_processes_that_were_started() -> None:
    found = Started.detect(TORCHRUN)
    assert found is not None
    assert found.over(given())["on"] == "local:4"
    with pytest.raises(WrongUse, match="has started 4 processes on this host, a rank each: --on local:2 says"):
        found.over(given(on="local:2"))


def test_a_layout_says_how_many_ranks_a_host_has_where_the_launcher_does_not() -> None:
    found = Started.detect(VERTEX)
    assert found is not None
    assert found.over(given(layout="fsdp=6"))["on"] is None
    assert found.over(given())["on"] == "local:1"


def test_hosts_that_do_not_know_where_to_meet_are_told_what_to_give() -> None:
    found = Started.detect(OPEN_MPI)
    assert found is not None
    with pytest.raises(WrongUse, match=r"has started 2 hosts and does not say where they meet\. Give --meet HOST:PORT"):
        found.over(given())


def test_a_job_is_submitted_once_and_not_by_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Started.unless_placed("ray:ranks=2") is None
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    assert Started.unless_placed("local:2") == Started.detect()
    with pytest.raises(
        WrongUse, match="Open MPI has started 4 processes, and each would start a run by --on ray:ranks=2"
    ):
        Started.unless_placed("ray:ranks=2")


def test_a_process_on_its_own_counts_as_a_host() -> None:
    found = Started.detect(TORCHRUN)
    assert found is not None
    own = found.on_its_own()
    assert (own.hosts, own.local_processes, own.local) == (8, 1, 0)
    assert own.name.endswith(".1")


def variables_of(cloud: str, number: int) -> dict[str, str]:
    """What a cloud tells the process on one of two hosts, node1 and node2."""
    names = ["node1", "node2"]
    if cloud == "SageMaker":
        return {"SM_HOSTS": json.dumps(names), "SM_CURRENT_HOST": names[number], "SM_NUM_GPUS": "0"}
    if cloud == "SkyPilot":
        return {"SKYPILOT_NODE_IPS": "10.77.0.1\n10.77.0.2", "SKYPILOT_NODE_RANK": str(number)}
    if cloud == "Vertex AI":
        pools = {"workerpool0": ["node1:2222"], "workerpool1": ["node2:2222"]}
        return {"CLUSTER_SPEC": json.dumps({"cluster": pools, "task": {"type": f"workerpool{number}", "index": 0}})}
    return {"PET_NNODES": "2", "PET_NODE_RANK": str(number), "PET_MASTER_ADDR": "node1", "PET_NPROC_PER_NODE": "1"}


def _in_cloud(variables: dict[str, str], words: list[str], cwd: Path, out: str) -> None:
    os.environ.update(variables)
    _main([*words, "--run", "theirs"], cwd, out)


@needs_namespaces
@pytest.mark.parametrize("cloud", ["SageMaker", "SkyPilot", "Vertex AI", "Kubeflow"])
def test_hosts_of_a_cloud_find_each_other(tmp_path: Path, cloud: str) -> None:
    (tmp_path / "slow.py").write_text(TASK)
    words = ["slow.py", "--steps", "5", "--device", "cpu"]
    with Hosts(2, tmp_path) as hosts:
        processes = [
            hosts[name].start(_in_cloud, variables_of(cloud, number), words, tmp_path, f"out of {name}")
            for number, name in enumerate(hosts.names)
        ]
        codes = [ended(process) for process in processes]
    assert codes == [0, 0], [(tmp_path / f"out of {name}").read_text() for name in hosts.names]
    assert phalanx("train", *words, "--on", "local:2", "--run", "ours", cwd=tmp_path).returncode == 0
    assert weights(tmp_path, "theirs") == weights(tmp_path, "ours")
