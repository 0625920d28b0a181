"""A Kubernetes cluster on this machine, for tests: kubectl's requests are answered, and pods are processes.

What is real: kubectl, the objects and their schemas, the commands of pods, each on a host of its own (``tests.hosts``)
with the names, addresses, variables, signals and restarts that its controller would give it. What is not: the API
server, the controllers and the kubelet, which are the few rules of theirs that are written down here.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.hosts import Hosts

ROOT = Path(__file__).parent.parent
SCHEMAS = Path(__file__).with_name("schemas") / "kubernetes.json"
VERSION = "1.37.0"
"""Of Kubernetes, whose schemas objects are held to."""
IMAGE = "example.org/phalanx:1"
"""The only one that can be pulled."""
RESOURCES = {
    "pods": ("v1", "Pod"), "services": ("v1", "Service"), "jobs": ("batch/v1", "Job"),
    "jobsets": ("jobset.x-k8s.io/v1alpha2", "JobSet"), "pytorchjobs": ("kubeflow.org/v1", "PyTorchJob"),
    "trainjobs": ("trainer.kubeflow.org/v1alpha1", "TrainJob"),
}  # fmt: skip
NAMES_SECONDS = 3.0
"""So long a pod that comes again is known at its old address, as resolvers remember it."""
Object = dict[str, Any]

needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl not installed (Debian: kubernetes-client)"
)
needs_schemas = pytest.mark.skipif(
    find_spec("kubernetes_validate") is None, reason="kubernetes-validate not installed (PyPI)"
)


@cache
def _schemas() -> tuple[Any, Any]:
    """The registry of all schemas, and where those of Kubernetes's own kinds lie."""
    import kubernetes_validate as validate
    from referencing import Registry, Resource

    folder = Path(validate.__file__).parent / "kubernetes-json-schema" / f"v{VERSION}-local-strict"
    found = [json.loads(path.read_text()) for path in (SCHEMAS, folder / "_definitions.json")]
    return Registry().with_resources((each["$id"], Resource.from_contents(each)) for each in found), found[0]


def wrong_with(thing: Object) -> str:
    """What the schema of its kind says against an object; "": nothing."""
    import jsonschema

    registry, own = _schemas()
    kind, version = thing["kind"], thing["apiVersion"]
    if kind in own["$defs"]:
        schema = {"$ref": f"{own['$id']}#/$defs/{kind}"}
    else:
        group = {"v1": "core.v1", "batch/v1": "batch.v1"}[version]
        schema = {"$ref": f"https://kubernetes.io/api/_definitions.json#/$defs/io.k8s.api.{group}.{kind}"}
    errors = jsonschema.Draft202012Validator(schema, registry=registry).iter_errors(thing)
    return "; ".join(f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in errors)


@dataclass
class Process:
    """A pod with what it runs."""

    job: Object
    index: int
    hostname: str
    domain: str
    labels: dict[str, str]
    variables: dict[str, str]
    spec: Object
    node: str = ""
    waits: Object = field(default_factory=dict)
    """Its status, where it cannot be started."""
    process: subprocess.Popen[bytes] | None = None
    deleted: float = 0.0
    uid: str = field(default_factory=lambda: secrets.token_hex(8))
    made: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))

    @property
    def name(self) -> str:
        return f"{self.hostname}-{self.uid[:5]}"

    @property
    def code(self) -> int | None:
        ended = None if self.process is None else self.process.poll()
        return ended if ended is None or ended >= 0 else 128 - ended

    def status(self) -> Object:
        if self.process is None:
            return self.waits or {"phase": "Pending"}
        code = self.code
        state = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
        phase = "Running" if code is None else "Failed" if code else "Succeeded"
        name = self.spec["containers"][0]["name"]
        return {"phase": phase, "containerStatuses": [{"name": name, "restartCount": 0, "state": state}]}

    def to_object(self) -> Object:
        metadata = {
            "name": self.name, "namespace": self.job["metadata"]["namespace"], "uid": self.uid, "labels": self.labels,
            "creationTimestamp": self.made,
        }  # fmt: skip
        names = [{"name": each["name"]} for each in self.spec["containers"]]
        return {
            "apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": names},
            "status": self.status(),
        }  # fmt: skip


class KubernetesCluster:
    """An API server at loopback with namespaces default and team, whose nodes are hosts, a pod each."""

    def __init__(
        self, folder: Path, hosts: Hosts, kinds: tuple[str, ...] = tuple(RESOURCES), unknown: tuple[str, ...] = ()
    ) -> None:
        """``unknown``: fields of specs that it has not heard of."""
        self.folder, self.hosts, self.unknown = folder, hosts, unknown
        self.kinds = {name: RESOURCES[name] for name in kinds}
        self.environment = {"KUBECONFIG": str(folder / "config"), "HOME": str(folder)}
        self.objects: dict[tuple[str, str, str], Object] = {}
        """By resource, namespace and name."""
        self.pods: list[Process] = []
        self.lost: set[str] = set()
        """Nodes on which nothing runs any more."""
        self._named = math.inf
        """When names are told again."""
        self._lock = threading.RLock()
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"cluster": self}))
        self.server.daemon_threads = True
        at = f"http://127.0.0.1:{self.server.server_address[1]}"
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": at}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": ""}}],
        }  # fmt: skip
        Path(self.environment["KUBECONFIG"]).write_text(json.dumps(config))
        self._threads = [threading.Thread(target=target) for target in (self.server.serve_forever, self._control)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self.server.shutdown()
        self.server.server_close()
        for thread in self._threads:
            thread.join()
        for pod in self.pods:
            if pod.process is not None:
                pod.process.kill()
                pod.process.wait()

    # What tests do to it.

    def lose(self, node: str) -> None:
        """The node is gone: its pod is killed, and comes again elsewhere."""
        with self._lock:
            self.lost.add(node)
            for pod in self.pods:
                if pod.node == node and pod.process is not None:
                    pod.process.kill()

    def node_of(self, index: int) -> str:
        with self._lock:
            return next(pod.node for pod in reversed(self.pods) if pod.index == index)

    # The API server.

    def create(self, resource: str, namespace: str, thing: Object) -> tuple[int, Object]:
        if namespace not in ("default", "team"):
            return _refused(404, "NotFound", f'namespaces "{namespace}" not found')
        name = thing["metadata"]["name"]
        if wrong := wrong_with(thing):
            return _refused(422, "Invalid", f'{thing["kind"]} "{name}" is invalid: {wrong}')
        for field_name in set(self.unknown) & set(thing["spec"]):
            return _refused(400, "BadRequest", f'strict decoding error: unknown field "spec.{field_name}"')
        with self._lock:
            if (resource, namespace, name) in self.objects:
                return _refused(409, "AlreadyExists", f'{resource} "{name}" already exists')
            thing["metadata"] |= {"uid": secrets.token_hex(8), "namespace": namespace}
            self.objects[resource, namespace, name] = thing
            self.pods += reversed(list(_pods_of(thing)))  # the first comes last
        return 201, thing

    def found(self, resource: str, namespace: str, name: str) -> tuple[int, Object]:
        with self._lock:
            known = {pod.name: pod.to_object() for pod in self.pods} if resource == "pods" else {}
            thing = known.get(name) or self.objects.get((resource, namespace, name))
        return _refused(404, "NotFound", f'{resource} "{name}" not found') if thing is None else (200, thing)

    def listed(self, resource: str, namespace: str, selector: str) -> Object:
        wanted = dict(pair.split("=") for pair in selector.split(",") if pair)
        with self._lock:
            pods = [pod.to_object() for pod in self.pods] if resource == "pods" else []
            others = [each for key, each in self.objects.items() if key[:2] == (resource, namespace)]
        items = [each for each in pods + others if wanted.items() <= each["metadata"].get("labels", {}).items()]
        version, kind = RESOURCES[resource]
        return {"apiVersion": version, "kind": f"{kind}List", "metadata": {}, "items": items}

    def delete(self, resource: str, namespace: str, name: str) -> tuple[int, Object]:
        code, thing = self.found(resource, namespace, name)
        if code == 200:
            with self._lock:
                del self.objects[resource, namespace, name]
                self._end(thing)
        return code, thing

    def log(self, name: str, follow: bool) -> Iterator[bytes]:
        pod = next(pod for pod in self.pods if pod.name == name)
        with (self.folder / f"{name}.log").open("rb") as file:
            while True:
                ended = pod.code is not None
                if part := file.read():
                    yield part
                elif ended or not follow or self._over.is_set():
                    return
                else:
                    time.sleep(0.05)

    # The controllers, the scheduler and the kubelet.

    def _control(self) -> None:
        while not self._over.wait(0.1):
            with self._lock:
                for pod in self.pods:
                    if pod.process is None and not pod.deleted:
                        self._schedule(pod)
                for thing in list(self.objects.values()):
                    self._judge(thing)
                now = time.monotonic()
                if now > self._named:
                    self._names()
                    self._named = math.inf
                for pod in [pod for pod in self.pods if pod.deleted]:
                    if pod.process is None or pod.code is not None:
                        self.pods.remove(pod)
                    elif now > pod.deleted + pod.spec["terminationGracePeriodSeconds"]:
                        pod.process.kill()

    def _end(self, job: Object) -> None:
        """Its pods are asked to end, and go."""
        for pod in self.pods:
            if pod.job is job and not pod.deleted:
                pod.deleted = time.monotonic()
                if pod.process is not None:
                    pod.process.terminate()

    def _schedule(self, pod: Process) -> None:
        taken = {other.node for other in self.pods if other.process is not None and other.code is None}
        free = [name for name in self.hosts.names if name not in taken | self.lost]
        container = pod.spec["containers"][0]
        if not free or "nvidia.com/gpu" in container.get("resources", {}).get("limits", {}):
            message = f"0/{len(self.hosts.names)} nodes are available: insufficient nvidia.com/gpu."
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
            pod.waits = {"phase": "Pending", "conditions": [condition]}
        elif container["image"] != IMAGE:
            wait = {"reason": "ErrImagePull", "message": f"failed to pull {container['image']}: not found"}
            pod.waits = {"phase": "Pending", "containerStatuses": [{"name": "x", "state": {"waiting": wait}}]}
        else:
            again = any(other.hostname == pod.hostname and other is not pod for other in self.pods)
            pod.node = free[0]
            self._named = time.monotonic() + (NAMES_SECONDS if again else 0)
            self._start(pod, container)

    def _names(self) -> None:
        """Every host knows every pod that has a place."""
        there = [pod for pod in self.pods if pod.node and pod.code is None and pod.node not in self.lost]
        lines = ["127.0.0.1 localhost"]
        for pod in there:
            names = f"{pod.hostname}.{pod.domain}" if pod.domain else pod.hostname
            lines.append(f"{self.hosts.address(pod.node)} {names}")
        for host in self.hosts.names:
            (self.hosts.folder / f"hosts of {host}").write_text("\n".join(lines) + "\n")

    def _start(self, pod: Process, container: Object) -> None:
        variables = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOSTNAME": pod.hostname,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1",
            "HOME": str(self.folder), "KUBERNETES_SERVICE_HOST": "10.96.0.1", **pod.variables,
        }  # fmt: skip
        words = [_expanded(word, variables) for word in container["command"]]
        enter = [f"--{kind}=/proc/{self.hosts[pod.node].process.pid}/ns/{kind[:3]}" for kind in ("net", "uts")]
        enter += [f"--mount=/proc/{self.hosts[pod.node].process.pid}/ns/mnt"]
        script = f'echo {pod.hostname} > /proc/sys/kernel/hostname; cd {container.get("workingDir", "/")}; exec "$@"'
        within = ["setpriv", "--pdeathsig", "KILL", "nsenter", *enter, "sh", "-c", script, "sh"]
        with (self.folder / f"{pod.name}.log").open("wb") as out:
            pod.process = subprocess.Popen(
                [*within, *words], env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip

    def _judge(self, job: Object) -> None:
        """What becomes of a job whose pods have ended."""
        if job["kind"] == "Service" or job.get("status"):
            return
        pods = {pod.index: pod for pod in self.pods if pod.job is job}  # the newest of each index
        if all(pod.code == 0 for pod in pods.values()):
            done = {"JobSet": "Completed", "PyTorchJob": "Succeeded"}.get(job["kind"], "Complete")
            job["status"] = {"conditions": [{"type": done, "status": "True"}]}
        for pod in pods.values():
            if not pod.code:
                continue
            if pod.code in _final(job):
                why = {"reason": "PodFailurePolicy", "message": f"pod {pod.name} ended with exit code {pod.code}"}
                job["status"] = {"conditions": [{"type": "Failed", "status": "True", **why}]}
                for other in pods.values():
                    if other.process is not None:
                        other.process.terminate()
                return
            self.pods.append(
                Process(job, pod.index, pod.hostname, pod.domain, pod.labels, pod.variables, pod.spec)
            )  # it comes again under its name


def _final(job: Object) -> set[int]:
    """Exit codes after which a pod is not started again."""
    if job["kind"] == "PyTorchJob":
        assert job["spec"]["pytorchReplicaSpecs"]["Master"]["restartPolicy"] == "ExitCode"
        return set(range(1, 128))
    if job["kind"] == "TrainJob":
        return set()
    spec = job["spec"]["replicatedJobs"][0]["template"]["spec"] if job["kind"] == "JobSet" else job["spec"]
    return {
        code for rule in spec["podFailurePolicy"]["rules"] for code in rule.get("onExitCodes", {}).get("values", [])
    }


def _pods_of(job: Object) -> Iterator[Process]:
    """What the controller of its kind makes of a job."""
    name, spec = job["metadata"]["name"], job["spec"]
    if job["kind"] == "PyTorchJob":
        yield from _of_pytorchjob(job)
    elif job["kind"] in ("Job", "JobSet"):
        of_set = job["kind"] == "JobSet"
        inner = spec["replicatedJobs"][0]["template"]["spec"] if of_set else spec
        base = f"{name}-{spec['replicatedJobs'][0]['name']}-0" if of_set else name
        label = {"jobset.sigs.k8s.io/jobset-name": name, "jobset.sigs.k8s.io/replicatedjob-name": "workers"}
        template = inner["template"]
        domain = name if of_set else template["spec"].get("subdomain", "")
        for index in range(inner["completions"]):
            labels = {
                **template["metadata"]["labels"], "batch.kubernetes.io/job-name": base,
                "batch.kubernetes.io/job-completion-index": str(index), **(label if of_set else {}),
            }  # fmt: skip
            variables = {"JOB_COMPLETION_INDEX": str(index)}
            yield Process(job, index, f"{base}-{index}", domain, labels, variables, template["spec"])
    elif job["kind"] == "TrainJob":
        yield from _of_trainjob(job)


def _of_pytorchjob(job: Object) -> Iterator[Process]:
    name, replicas = job["metadata"]["name"], job["spec"]["pytorchReplicaSpecs"]
    world = sum(each["replicas"] for each in replicas.values())
    for role, each in replicas.items():
        for number in range(each["replicas"]):
            rank = number + (role == "Worker")
            labels = {
                **each["template"]["metadata"]["labels"], "training.kubeflow.org/job-name": name,
                "training.kubeflow.org/replica-type": role.lower(),
            }  # fmt: skip
            variables = {
                "PYTHONUNBUFFERED": "1", "MASTER_PORT": "23456", "PET_MASTER_PORT": "23456", "WORLD_SIZE": str(world),
                "MASTER_ADDR": f"{name}-master-0", "PET_MASTER_ADDR": f"{name}-master-0", "RANK": str(rank),
                "PET_NODE_RANK": str(rank), "PET_NNODES": str(world),
            }  # fmt: skip
            hostname = f"{name}-{role.lower()}-{number}"
            yield Process(job, rank, hostname, "", labels, variables, each["template"]["spec"])


def _of_trainjob(job: Object) -> Iterator[Process]:
    """As the runtime torch-distributed has it."""
    name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
    nodes = trainer["numNodes"]
    for index in range(nodes):
        labels = {
            "jobset.sigs.k8s.io/jobset-name": name, "jobset.sigs.k8s.io/replicatedjob-name": "node",
            "batch.kubernetes.io/job-completion-index": str(index),
        }  # fmt: skip
        variables = {
            "PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(index), "PET_MASTER_ADDR": f"{name}-node-0-0.{name}", "PET_MASTER_PORT": "29400",
        }  # fmt: skip
        container = {"name": "node", "image": trainer["image"], "command": trainer["command"]}
        spec = {"containers": [container], "terminationGracePeriodSeconds": 30}
        yield Process(job, index, f"{name}-node-0-{index}", name, labels, variables, spec)


def _expanded(word: str, variables: dict[str, str]) -> str:
    """As the kubelet does, from left to right: $$ is a dollar, $(NAME) a variable, any other dollar itself."""

    def meant(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", meant, word)


def _refused(code: int, reason: str, message: str) -> tuple[int, Object]:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
    return code, {**status, "reason": reason, "message": message, "code": code}


class _Handler(BaseHTTPRequestHandler):
    """Requests of kubectl's."""

    cluster: KubernetesCluster
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        resource, namespace, name, *more = self._object(parts.path)
        if more:
            self._stream(name, query.get("follow") == "true")
        elif name:
            self._answer(*self.cluster.found(resource, namespace, name))
        elif resource:
            self._answer(200, self.cluster.listed(resource, namespace, query.get("labelSelector", "")))
        elif parts.path == "/openapi/v2":
            self._send(200, b"", "application/com.github.proto-openapi.spec.v2.v1.0+protobuf")  # it says nothing
        else:
            self._answer(*self._discovered(parts.path.strip("/")))

    def do_POST(self) -> None:
        resource, namespace, *_ = self._object(urlsplit(self.path).path)
        thing = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(*self.cluster.create(resource, namespace, thing))

    def do_DELETE(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        resource, namespace, name, *_ = self._object(urlsplit(self.path).path)
        self._answer(*self.cluster.delete(resource, namespace, name))

    def _object(self, path: str) -> tuple[str, ...]:
        """A resource, its namespace, a name and what is wanted of it."""
        found = re.fullmatch(r"/apis?/.*?/namespaces/([^/]+)/([^/]+)(?:/([^/]+))?(/log)?", path)
        if found is None or found[2] not in self.cluster.kinds:
            return "", "", ""
        return (found[2], found[1], found[3] or "", *([found[4]] if found[4] else []))

    def _discovered(self, path: str) -> tuple[int, Object]:
        """Which kinds there are."""
        versions = {version for version, _ in self.cluster.kinds.values()}
        if path == "api":
            return 200, {"kind": "APIVersions", "versions": ["v1"]}
        if path == "apis":
            groups = [
                {"name": group, "versions": [{"groupVersion": f"{group}/{version}", "version": version}]}
                for group, version in (each.split("/") for each in sorted(versions - {"v1"}))
            ]
            return 200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        if path == "openapi/v3":
            roots = {version: "api/v1" if version == "v1" else f"apis/{version}" for version in versions}
            paths = {root: {"serverRelativeURL": f"/openapi/v3/{root}"} for root in roots.values()}
            return 200, {"paths": paths}
        version = re.sub("^(openapi/v3/)?apis?/", "", path)
        kinds = {name: kind for name, (known, kind) in self.cluster.kinds.items() if known == version}
        if not kinds:
            return _refused(404, "NotFound", "the server could not find the requested resource")
        return 200, _validating(version, kinds) if path.startswith("openapi") else _resources(version, kinds)

    def _answer(self, code: int, thing: Object) -> None:
        self._send(code, json.dumps(thing).encode(), "application/json")

    def _send(self, code: int, data: bytes, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, name: str, follow: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        with suppress(BrokenPipeError, ConnectionResetError):
            for part in self.cluster.log(name, follow):
                self.wfile.write(part)


def _resources(version: str, kinds: dict[str, str]) -> Object:
    verbs = ["create", "delete", "get", "list"]
    found = [
        {"name": name, "singularName": name[:-1], "namespaced": True, "kind": kind, "verbs": verbs}
        for name, kind in kinds.items()
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": found}


def _validating(version: str, kinds: dict[str, str]) -> Object:
    """That the server checks fields itself, so that kubectl need not."""
    group, _, number = version.rpartition("/")
    checks = {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}
    known = kinds | ({"namespaces": "Namespace"} if version == "v1" else {})  # which kubectl asks for in others' stead
    paths = {
        f"/{name}": {
            "patch": {
                "parameters": [checks],
                "x-kubernetes-group-version-kind": {"group": group, "version": number, "kind": kind},
                "responses": {},
            }
        }
        for name, kind in known.items()
    }
    return {"openapi": "3.0.0", "info": {"title": "test", "version": "1"}, "paths": paths}
