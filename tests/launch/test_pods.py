"""Pods in words."""

from __future__ import annotations

from typing import Any

from phalanx.launch.pods import first_of, in_words


def pod(name: str, phase: str = "Running", made: str = "2026-01-01T00:00:00Z", **more: Any) -> dict[str, Any]:
    labels = more.pop("labels", {})
    metadata = {"name": name, "labels": labels, "creationTimestamp": made}
    return {"metadata": metadata, "status": {"phase": phase, **more}}


def test_the_first_pod_is_the_newest_of_its_number() -> None:
    index = "batch.kubernetes.io/job-completion-index"
    pods = [
        pod("b", labels={index: "0"}), pod("c", made="2026-01-01T00:00:09Z", labels={index: "0"}),
        pod("a", labels={index: "1"}), pod("d", labels={index: "0", "jobset.sigs.k8s.io/replicatedjob-name": "model"}),
    ]  # fmt: skip
    found = first_of(pods)
    assert found is not None
    assert found["metadata"]["name"] == "c"
    role = "training.kubeflow.org/replica-type"
    found = first_of([pod("w", labels={role: "worker"}), pod("m", labels={role: "master"})])
    assert found is not None
    assert found["metadata"]["name"] == "m"
    assert first_of([]) is None


def test_what_pods_wait_for_is_said() -> None:
    assert in_words([], 2) == (False, "0 of 2 pods running")
    assert in_words([pod("a"), pod("b", "Failed")], 2) == (False, "1 of 2 pods running, 1 lost so far")
    wait = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off  pulling\nimage x."}}}
    stuck, text = in_words([pod("a"), pod("b", "Pending", containerStatuses=[wait])], 2)
    assert stuck
    assert text == "1 of 2 pods running; pod b waits, its image cannot be pulled: Back-off pulling image x"
    starting = {"state": {"waiting": {"reason": "ContainerCreating"}}}
    assert in_words([pod("a", "Pending", containerStatuses=[starting])], 1) == (False, "0 of 1 pod running")
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "x " * 300}
    stuck, text = in_words([pod("a", "Pending", conditions=[condition])], 1)
    assert stuck
    assert "pod a fits on no node: x x" in text
    assert len(text) < 300
