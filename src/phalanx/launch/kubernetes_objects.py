"""What is handed to Kubernetes: pods that are alike, as a JobSet, a Job with a Service, a TrainJob or a PyTorchJob.

Pods have names that stay when one is replaced, and meet at the first's. One that is killed, or whose node is drained,
is started again and goes on from the run's folder. An exit code of 1 to 3 is a verdict, which stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PORT = 29400
"""Where supervisors meet: a pod has a network of its own."""
VERDICTS = (1, 2)
"""Exit codes with which ``phalanx train`` says that starting it again does not help."""
RUN_LABEL = "phalanx.dev/run"
"""Of a job: from which run's folder it was submitted."""
Object = dict[str, Any]


@dataclass(frozen=True)
class JobKind:
    """One of Kubernetes's ways to run pods together."""

    resource: str
    """In full, for kubectl."""
    title: str
    version: str
    label: str
    """Of its pods: the job's name."""
    container: str
    """The name that its controller looks for."""
    first: str
    """Where the first pod is found; {0}: the job's name."""
    longest: int
    """Characters of a job's name, to which its controller adds."""
    install: str = ""
    """Who brings it, where Kubernetes itself does not."""


KINDS = {
    "jobset": JobKind(
        "jobsets.jobset.x-k8s.io", "JobSet", "jobset.x-k8s.io/v1alpha2", "jobset.sigs.k8s.io/jobset-name", "phalanx",
        "{0}-workers-0-0.{0}", 40, "JobSet (https://jobset.sigs.k8s.io)",
    ),
    "trainjob": JobKind(
        "trainjobs.trainer.kubeflow.org", "TrainJob", "trainer.kubeflow.org/v1alpha1",
        "jobset.sigs.k8s.io/jobset-name", "node", "{0}-node-0-0.{0}", 40, "Kubeflow's trainer",
    ),
    "pytorchjob": JobKind(
        "pytorchjobs.kubeflow.org", "PyTorchJob", "kubeflow.org/v1", "training.kubeflow.org/job-name", "pytorch",
        "{0}-master-0", 40, "Kubeflow's training operator",
    ),
    "job": JobKind("jobs.batch", "Job", "batch/v1", "batch.kubernetes.io/job-name", "phalanx", "{0}-0.{0}", 50),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Pods:
    """So many pods that are alike, each of which runs a supervisor."""

    name: str
    """The job's."""
    image: str
    run: str = ""
    """From which run's folder it was submitted, as a label."""
    words: tuple[str, ...]
    nodes: int
    ranks: int
    grace: int
    """Seconds between SIGTERM and SIGKILL."""
    namespace: str = ""
    limits: Mapping[str, str] = field(default_factory=dict)
    """What a pod has for itself: GPUs, memory, RDMA devices."""
    cpus: str = ""
    claim: str = ""
    """A PersistentVolumeClaim that all of them mount."""
    mount: str = ""
    """Where."""
    shm: str = ""
    """The most that /dev/shm holds; by default what memory there is."""
    folder: str = ""
    """Where the command is run; by default as the image says."""
    secret: str = ""
    """A Secret whose keys are environment variables."""
    group: str = ""
    """Whose the volume's folder becomes."""
    account: str = ""
    selector: Mapping[str, str] = field(default_factory=dict)
    retries: int = 20
    """So many pods may be lost before the job fails; those of drained nodes do not count."""
    runtime: str = "torch-distributed"
    """Of a TrainJob."""

    def resources(self) -> Object:
        asked = {"cpu": self.cpus} if self.cpus else {}
        found = {"limits": dict(self.limits), "requests": asked}
        return {name: value for name, value in found.items() if value}

    def volumes(self) -> list[Object]:
        memory = {"medium": "Memory", **({"sizeLimit": self.shm} if self.shm else {})}
        claim = {"name": "run", "persistentVolumeClaim": {"claimName": self.claim}}
        return [{"name": "shm", "emptyDir": memory}, *([claim] if self.claim else [])]

    def mounts(self) -> list[Object]:
        run = {"name": "run", "mountPath": self.mount}
        return [{"name": "shm", "mountPath": "/dev/shm"}, *([run] if self.claim else [])]

    def rights(self) -> Object:
        """Of its container: RDMA registers memory, which must be locked."""
        return {"capabilities": {"add": ["IPC_LOCK"]}} if any("rdma" in name for name in self.limits) else {}

    def placed(self) -> Object:
        """Of a pod: where it may run, and as whom."""
        taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        group = {"fsGroup": int(self.group or 0), "fsGroupChangePolicy": "OnRootMismatch"}  # or the key's mode changes
        found = {
            "serviceAccountName": self.account,
            "nodeSelector": dict(self.selector),
            "tolerations": [taint] if "nvidia.com/gpu" in self.limits else [],
            "securityContext": group if self.group else {},
        }
        return {name: value for name, value in found.items() if value}

    def template(self, kind: JobKind, **more: Any) -> Object:
        """Of a pod."""
        container = {
            "name": kind.container,
            "image": self.image,
            "command": list(self.words),
            "workingDir": self.folder,
            "envFrom": [{"secretRef": {"name": self.secret}}] if self.secret else [],
            "resources": self.resources(),
            "securityContext": self.rights(),
            "volumeMounts": self.mounts(),
        }
        return {
            "metadata": {"labels": self.labels},
            "spec": {
                **more,
                "terminationGracePeriodSeconds": self.grace,
                **self.placed(),
                "containers": [{name: value for name, value in container.items() if value}],
                "volumes": self.volumes(),
            },
        }

    @property
    def labels(self) -> Object:
        return {"app.kubernetes.io/name": "phalanx", "app.kubernetes.io/instance": self.name}


def objects(kind: str, pods: Pods, old: bool = False) -> list[Object]:
    """What is to be created; ``old``: by names that fields had before."""
    if kind == "trainjob":
        return _trainjob(KINDS[kind], pods, old)
    made = {"jobset": _jobset, "pytorchjob": _pytorchjob, "job": _job}[kind]
    return made(KINDS[kind], pods)


def _object(kind: JobKind, pods: Pods, spec: Object) -> Object:
    place = {"namespace": pods.namespace} if pods.namespace else {}
    labels = {**pods.labels, **({RUN_LABEL: pods.run} if pods.run else {})}
    metadata = {"name": pods.name, **place, "labels": labels}
    return {"apiVersion": kind.version, "kind": kind.title, "metadata": metadata, "spec": spec}


def _indexed(kind: JobKind, pods: Pods, **more: Any) -> Object:
    """A Job's spec."""
    ended = {"containerName": kind.container, "operator": "In", "values": list(VERDICTS)}
    rules = [
        {"action": "FailJob", "onExitCodes": ended},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    return {
        "completionMode": "Indexed",
        "completions": pods.nodes,
        "parallelism": pods.nodes,
        "backoffLimit": pods.retries,
        "podFailurePolicy": {"rules": rules},
        "template": pods.template(kind, restartPolicy="Never", **more),
    }


def _jobset(kind: JobKind, pods: Pods) -> list[Object]:
    workers = {"name": "workers", "replicas": 1, "template": {"spec": _indexed(kind, pods)}}
    network = {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    return [_object(kind, pods, {"network": network, "replicatedJobs": [workers]})]


def _job(kind: JobKind, pods: Pods) -> list[Object]:
    job = _object(kind, pods, _indexed(kind, pods, subdomain=pods.name))
    if pods.nodes == 1:
        return [job]
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {kind.label: pods.name}}
    return [{**_object(kind, pods, service), "apiVersion": "v1", "kind": "Service"}, job]


def _pytorchjob(kind: JobKind, pods: Pods) -> list[Object]:
    """Its policy ExitCode starts again what was killed, by exit codes from 128 on."""
    each = {"restartPolicy": "ExitCode", "template": pods.template(kind)}
    replicas = {"Master": {"replicas": 1, **each}}
    if pods.nodes > 1:
        replicas["Worker"] = {"replicas": pods.nodes - 1, **each}
    policy = {"backoffLimit": pods.retries, "cleanPodPolicy": "None"}
    return [_object(kind, pods, {"runPolicy": policy, "pytorchReplicaSpecs": replicas})]


def _trainjob(kind: JobKind, pods: Pods, old: bool) -> list[Object]:
    """Its runtime has the rest: how long a pod may take to end, and whether it is started again."""
    trainer = {
        "image": pods.image,
        "command": list(pods.words),
        "numNodes": pods.nodes,
        "numProcPerNode": pods.ranks,
        "resourcesPerNode": pods.resources(),
    }
    container: Object = {"name": kind.container, "volumeMounts": pods.mounts()}
    if pods.rights() and not old:
        container["securityContext"] = pods.rights()
    pod = {**pods.placed(), "containers": [container], "volumes": pods.volumes()}
    if old:
        patch: Object = {"podTemplateOverrides": [{"targetJobs": [{"name": "node"}], "spec": pod}]}
    else:
        job = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
        spec = {"template": {"spec": {"replicatedJobs": [job]}}}
        patch = {"runtimePatches": [{"manager": "phalanx.dev/train", "trainingRuntimeSpec": spec}]}
    given = {name: value for name, value in trainer.items() if value}
    return [_object(kind, pods, {"runtimeRef": {"name": pods.runtime}, "trainer": given, **patch})]
