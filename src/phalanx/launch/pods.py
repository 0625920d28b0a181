"""What Kubernetes says of pods, in words: which run, and what the others wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.words import many

Pod = Mapping[str, Any]
STUCK = {
    "ErrImagePull": "its image cannot be pulled",
    "ImagePullBackOff": "its image cannot be pulled",
    "InvalidImageName": "its image's name cannot be one",
    "CreateContainerConfigError": "a Secret or ConfigMap of its is not there",
    "CreateContainerError": "its container cannot be made",
    "RunContainerError": "its command cannot be started",
    "CrashLoopBackOff": "it ends again and again",
}
"""Why a container may wait for ever."""
LONGEST = 200


def first_of(pods: Sequence[Pod]) -> Pod | None:
    """The pod that has rank 0 and speaks for all; the newest, where it was replaced."""
    leading = [pod for pod in pods if _leads(pod)]
    return max(leading, key=lambda pod: pod["metadata"].get("creationTimestamp") or "", default=None)


def _leads(pod: Pod) -> bool:
    labels = pod["metadata"].get("labels", {})
    if "training.kubeflow.org/replica-type" in labels:
        return labels["training.kubeflow.org/replica-type"].lower() == "master"
    annotations = pod["metadata"].get("annotations", {})
    index = labels.get("batch.kubernetes.io/job-completion-index")
    index = annotations.get("batch.kubernetes.io/job-completion-index") if index is None else index
    return index == "0" and labels.get("jobset.sigs.k8s.io/replicatedjob-name", "node") in ("node", "workers")


def in_words(pods: Sequence[Pod], wanted: int) -> tuple[bool, str]:
    """Whether one waits for what may never come, and how all of them are doing."""
    waiting = [text for text in map(_waits, pods) if text]
    phases = [pod.get("status", {}).get("phase", "") for pod in pods]
    failed = phases.count("Failed")
    parts = [f"{phases.count('Running')} of {many(wanted, 'pod')} running"]
    parts += [f"{phases.count('Succeeded')} done"] if "Succeeded" in phases else []
    parts += [f"{failed} lost so far"] if failed else []
    return bool(waiting), "; ".join([", ".join(parts), *dict.fromkeys(waiting)])


def _waits(pod: Pod) -> str:
    name, status = pod["metadata"]["name"], pod.get("status", {})
    for each in status.get("conditions", []):
        if each.get("type") == "PodScheduled" and each.get("reason") == "Unschedulable":
            return f"pod {name} fits on no node: {_short(each.get('message', ''))}"
    for each in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        wait = each.get("state", {}).get("waiting", {})
        if wait.get("reason") in STUCK:
            more = _short(wait.get("message", "")) or wait["reason"]
            return f"pod {name} waits, {STUCK[wait['reason']]}: {more}"
    return ""


def _short(text: str) -> str:
    text = " ".join(text.split()).rstrip(".")
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
