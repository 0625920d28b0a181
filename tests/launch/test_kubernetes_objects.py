"""Objects of each kind are ones that Kubernetes, JobSet and Kubeflow take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from phalanx.launch.kubernetes_objects import KINDS, Pods, objects
from tests.kubernetes import needs_schemas, wrong_with

PLAIN = Pods(name="gpt", image="a/b:1", words=("python", "-m", "phalanx"), nodes=1, ranks=1, grace=60)
RICH = replace(
    PLAIN, nodes=4, ranks=8, namespace="team", limits={"nvidia.com/gpu": "8", "memory": "1Gi", "rdma/ib": "1"},
    cpus="8", claim="runs", mount="/shared", shm="8Gi", group="1000", account="me", selector={"pool": "big"},
)  # fmt: skip


@needs_schemas
@pytest.mark.parametrize("kind", KINDS)
def test_objects_fit_their_schemas(kind: str) -> None:
    more: dict[str, Any] = {} if kind == "trainjob" else {"secret": "keys", "folder": "/workspace"}
    for pods in (PLAIN, RICH, replace(RICH, **more)):
        for old in (False, True):
            for each in objects(kind, pods, old):
                assert not wrong_with(each)


@needs_schemas
def test_a_schema_finds_what_is_wrong() -> None:
    (made,) = objects("jobset", PLAIN)
    made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["imag"] = "x"
    assert "'imag' was unexpected" in wrong_with(made)
    (made,) = objects("pytorchjob", RICH)
    made["spec"]["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] = "Sometimes"
    assert "'Sometimes' is not one of" in wrong_with(made)


def test_a_job_has_a_service_by_which_pods_find_each_other() -> None:
    service, job = objects("job", RICH)
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"] == "gpt"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": "gpt"}
    assert service["spec"]["clusterIP"] == "None"
    assert [each["kind"] for each in objects("job", PLAIN)] == ["Job"]


def test_verdicts_are_final_and_drained_pods_do_not_count() -> None:
    (made,) = objects("jobset", RICH)
    first, second = made["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert (first["action"], first["onExitCodes"]["values"]) == ("FailJob", [1, 2])
    assert (second["action"], second["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    (made,) = objects("pytorchjob", RICH)
    replicas = made["spec"]["pytorchReplicaSpecs"]
    assert {name: each["replicas"] for name, each in replicas.items()} == {"Master": 1, "Worker": 3}
    assert {each["restartPolicy"] for each in replicas.values()} == {"ExitCode"}


def test_a_key_keeps_its_mode_where_a_volume_gets_a_group() -> None:
    assert RICH.placed()["securityContext"] == {"fsGroup": 1000, "fsGroupChangePolicy": "OnRootMismatch"}
