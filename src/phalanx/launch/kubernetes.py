"""On Kubernetes: a job of pods, one supervisor each, created with kubectl and followed.

Kubernetes places pods, starts those again that are lost, and gives them names by which they meet. The run's folder is
on a volume that all of them mount; what this machine keeps of it is the job's name, its YAML, and what it printed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from phalanx.errors import CannotHere, WrongUse, closest
from phalanx.files import write_whole
from phalanx.folder_files import BadFile, make_folder, read_text
from phalanx.launch import place
from phalanx.launch.following import follow
from phalanx.launch.kubernetes_objects import KINDS, PORT, RUN_LABEL, VERDICTS, JobKind, Pods, objects
from phalanx.launch.place import ENDED, QUEUED, RUNNING, UNKNOWN, Command, Place, Status
from phalanx.launch.pod_log import PodLog
from phalanx.launch.pods import first_of, in_words
from phalanx.launch.yaml_text import to_yaml
from phalanx.run import Run
from phalanx.verdict import Verdict

NUMBERS = ("nodes", "gpus", "ranks", "retries", "group")
NAMED = {
    "namespace": "namespace", "image": "image", "cpus": "cpus", "shm": "shm", "folder": "folder", "secret": "secret",
    "service-account": "account", "runtime": "runtime",
}  # fmt: skip
"""Options that pods have as they are, by the names that pods have for them."""
OPTIONS = (*NUMBERS, *NAMED, "kind", "memory", "rdma", "volume", "node-selector")
NOT_OF_TRAINJOB = ("folder", "secret", "retries")
"""What only the runtime of a TrainJob says."""
MARGIN_SECONDS = 30
"""Beside the time that ranks have to save in."""
LABEL = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
"""A name of a namespace, or of a job."""
ANSWER_SECONDS = 60.0
"""In which kubectl must answer a question."""
QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kKMGTP]i?)?")
OVER = {"Complete": 0, "Completed": 0, "Succeeded": 0, "Failed": 1}
"""Conditions that a job does not leave, in the words of all kinds."""


@dataclass(frozen=True, kw_only=True)
class Kubernetes(Place):
    """Pods of a Kubernetes cluster, the one that kubectl's configuration names."""

    word: ClassVar[str] = "kubernetes"
    job: ClassVar[str] = LABEL
    given: Mapping[str, str] = field(default_factory=dict)
    """What follows ``--on kubernetes:``."""

    @classmethod
    def parse(cls, options: Mapping[str, str], rest: str) -> Self:
        for name in [*options, *(rest.split(",") if rest else ())]:
            if name not in OPTIONS or not options.get(name):
                if name in OPTIONS:
                    raise WrongUse(f"--on kubernetes: {name} needs a value. See docs/kubernetes.md.")
                raise WrongUse(f"--on kubernetes: {name!r} is not one of its options; {closest(name, OPTIONS)}")
        if "namespace" in options and not re.fullmatch(LABEL, options["namespace"]):
            raise WrongUse(
                f"namespace={options['namespace']} is no name of a namespace. Use a-z, 0-9 and '-', up to 63."
            )
        for name in ("cpus", "memory", "shm"):
            if name in options and not QUANTITY.fullmatch(options[name]):
                raise WrongUse(f"{name}={options[name]} is no quantity of Kubernetes's. Write it like {name}=64Gi.")
        nodes, gpus = place.count(options, "nodes", 1), place.count(options, "gpus", 0, least=0)
        made = cls(nodes=nodes, gpus=gpus, ranks=place.count(options, "ranks", gpus or 1), given=dict(options))
        place.count(options, "retries", 20, least=0)
        place.count(options, "group", 0, least=0)
        if made._kind == "trainjob" and (wrong := [name for name in NOT_OF_TRAINJOB if name in options]):
            raise WrongUse(
                f"{wrong[0]}= is not a TrainJob's to say: its runtime does. Leave it out, or use kind=jobset."
            )
        return made

    @property
    def _kind(self) -> str:
        word = self.given.get("kind", "jobset").lower()
        if word not in KINDS:
            raise WrongUse(f"kind={word} is not known; {closest(word, list(KINDS))}")
        return word

    @property
    def kind(self) -> JobKind:
        return KINDS[self._kind]

    @property
    def text(self) -> str:
        """As ``--on`` has it."""
        return f"kubernetes:{','.join(f'{name}={value}' for name, value in self.given.items())}"

    def preview(self, command: Command) -> str:
        return to_yaml(objects(self._kind, self.pods(command)))

    def pods(self, command: Command) -> Pods:
        """Those that are to run a command."""
        if "image" not in self.given:
            raise WrongUse("pods need an image with Phalanx and the task in it. Give --on kubernetes:image=NAME,...")
        mount, run = self._where(command)
        self._check_paths(command, mount)
        name = self._name(command.run)
        chosen = {field: self.given[option] for option, field in NAMED.items() if option in self.given}
        retries = place.count(self.given, "retries", 20 if command.verb == "train" else 0, least=0)
        return Pods(
            name=name, run=_label(command.run), words=self._words(command, name, run), nodes=self.nodes,
            ranks=self.ranks, grace=round(command.grace) + MARGIN_SECONDS, limits=self._limits(), mount=mount,
            claim=self.given.get("volume", "").partition(":")[0], selector=self._selector(),
            group=self.given.get("group", ""), retries=retries, **chosen,
        )  # fmt: skip

    def _where(self, command: Command) -> tuple[str, str]:
        """The folder that a volume is mounted at, and the run's in a pod."""
        claim, _, at = self.given.get("volume", "").partition(":")
        if not claim:
            self._check_without_volume(command)
        at = at or str(command.run.parent)
        if not at.startswith("/") or at == "/":
            raise WrongUse(f"a volume cannot be mounted at {at}. Write it like volume={claim}:/shared")
        if command.run.is_relative_to(at):
            return at, str(command.run)
        return at, f"{at.rstrip('/')}/{self._named(command.run) or command.run.name}"

    def _folder(self, run: Path) -> Path:
        """The file that has the name of the run's folder on a volume that this machine does not mount."""
        return run / self.word / "folder"

    def _named(self, run: Path) -> str:
        """What that file says; nothing where it is not there."""
        path = self._folder(run)
        try:
            name = read_text(run, path, 1000).strip()
        except FileNotFoundError:
            return ""
        if not re.fullmatch(r"[^/\x00-\x1f]{1,255}", name) or name in (".", ".."):
            raise BadFile(path, "is no name of a folder")
        return name

    def _name_folder(self, command: Command) -> None:
        """One that no other machine's run has there."""
        named = self._folder(command.run)
        if not named.exists():
            make_folder(command.run, named.parent)
            write_whole(named, f"{command.run.name}-{secrets.token_hex(3)}\n", within=command.run)

    def _check_without_volume(self, command: Command) -> None:
        if "://" not in (command.value("--checkpoints") or ""):
            raise WrongUse(
                "without a volume the run would end with its pod. Give volume=CLAIM, a PersistentVolumeClaim "
                "(ReadWriteMany for several nodes), or --checkpoints s3://..."
            )
        if self.nodes > 1 and "secret" not in self.given:
            raise WrongUse(
                "without a volume pods share no key. Give volume=CLAIM, or secret=NAME of a Secret with PHALANX_KEY: "
                "kubectl create secret generic NAME --from-literal=PHALANX_KEY=$(openssl rand -hex 32)"
            )

    def _name(self, run: Path) -> str:
        """A job's, by its run and by how often that was submitted."""
        slug = re.sub("[^a-z0-9]+", "-", run.name.lower()).strip("-")
        slug = slug if slug[:1].isalpha() else f"run-{slug}".rstrip("-")
        before = len(list((run / self.word).glob("*.yaml")))
        last = f"-{zlib.crc32(str(run).encode()) & 0xFFFF:04x}{f'-{before + 1}' if before else ''}"
        return slug[: self.kind.longest - len(last)].rstrip("-") + last

    def _check_paths(self, command: Command, mount: str) -> None:
        """Refuse files of this machine, which pods do not see."""
        for option in ("--config", "--checkpoints", "--init-from"):
            at = command.value(option)
            seen = not at or "://" in at or (mount and Path(at).is_relative_to(mount)) or option == "--init-from"
            if not seen:
                where = f"under {mount}" if mount else "on a volume"
                raise WrongUse(f"{option} {at} is a path that pods do not see. Give one {where}, or a URL.")

    def _words(self, command: Command, name: str, run: str) -> tuple[str, ...]:
        words = replace(command, python="python").on(self.ranks, run)
        if self.nodes > 1 and self._kind != "trainjob":  # a TrainJob's pods are told by their variables
            if command.verb == "train" and "--min-nodes" not in words:
                words += ["--min-nodes", str(self.nodes)]
            words += ["--max-nodes", str(self.nodes), "--meet", f"{self.kind.first.format(name)}:{PORT}"]
        return tuple(word.replace("$", "$$") for word in words)  # $$ is a dollar there, and $(X) a variable

    def _limits(self) -> dict[str, str]:
        found = {"nvidia.com/gpu": str(self.gpus)} if self.gpus else {}
        if "memory" in self.given:
            found["memory"] = self.given["memory"]
        if "rdma" in self.given:
            name, equals, number = self.given["rdma"].partition("=")
            if "/" not in name or not (number.isdecimal() if equals else True):
                raise WrongUse(f"rdma={self.given['rdma']} names no device. Write it like rdma=rdma/ib=1")
            found[name] = number or "1"
        return found

    def _selector(self) -> dict[str, str]:
        """Labels of nodes, ``a=b+c=d``."""
        pairs = [part.partition("=") for part in self.given.get("node-selector", "").split("+") if part]
        if not all(equals for _, equals, _ in pairs):
            raise WrongUse(f"node-selector={self.given['node-selector']} is none. Write it like node-selector=pool=big")
        return {name: value for name, _, value in pairs}

    def train(self, command: Command, check: Callable[[], object]) -> Verdict:
        self.pods(command)  # refuses what cannot be meant, before the model is looked at
        _check()
        check()
        job = self.submit(command)
        run = Run(command.run)
        print(f" submit  {self.kind.title} {job}: {run.path / self.word / f'{job}.yaml'}", flush=True)
        verdict = follow(self, run, job)
        if verdict.holds and not run.weights_path.exists():  # on a volume that this machine does not mount
            at = Run(self._where(command)[1]).weights_path
            return replace(verdict, evidence=[f"weights: {at}, in {self.given.get('volume', 'its first pod')}"])
        return verdict

    def submit(self, command: Command) -> str:
        """The job's name."""
        _check()
        run = Run(command.run)
        place.check_over(run)
        begun = (run.path / self.word).exists()
        self._name_folder(command)
        pods = self.pods(command)
        file = run.path / self.word / f"{pods.name}.yaml"
        for old in (False, True):
            made = objects(self._kind, pods, old)
            done = self.kubectl("create", "-f", "-", text=to_yaml(made))
            if 'unknown field "spec.runtimePatches"' not in done.stderr:
                break
        if done.returncode:
            if self._kind == "job" and "AlreadyExists" not in done.stderr:
                self.kubectl("delete", f"service/{pods.name}", "--wait=false", "--ignore-not-found")
            if not begun:
                shutil.rmtree(file.parent)
            raise CannotHere(f"Kubernetes does not take the job: {_words(done.stderr)}. {self._advice(done.stderr)}")
        make_folder(run.path, file.parent)
        write_whole(file, to_yaml(made), within=run.path)
        place.note(run, self.text, pods.name)
        return pods.name

    def kubectl(self, *words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        """What kubectl says, in the job's namespace."""
        line = self.line(*words)
        try:
            return subprocess.run(line, capture_output=True, text=True, input=text or "", timeout=ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            said = f"kubectl does not answer in {ANSWER_SECONDS:g} s, as if no connect to the cluster were possible"
            return subprocess.CompletedProcess(line, 1, "", said)

    def line(self, *words: str) -> list[str]:
        """A command line of kubectl's."""
        space = self.given.get("namespace")
        return ["kubectl", *([f"--namespace={space}"] if space else []), *words]

    def _advice(self, said: str) -> str:
        if (
            "no matches for kind" in said
            or "doesn't have a resource type" in said
            or "could not find the requested" in said
        ):
            return f"The cluster has no {self.kind.install}: have it installed, or use kind=job, which needs nothing."
        if "AlreadyExists" in said:
            return "Give --run another name, or delete that job with kubectl."
        if re.search('namespaces? "[^"]*" not found', said):
            return "Give namespace= one that kubectl get namespaces lists."
        if "orbidden" in said or "nauthorized" in said or "must be logged in" in said:
            return "Ask for the right to create it (kubectl auth can-i --list), or give namespace= another."
        if "connect" in said or "refused" in said or "no such host" in said or "timeout" in said:
            return "See that kubectl cluster-info reaches a cluster: kubectl config get-contexts lists those known."
        return "Change the options after --on kubernetes:, or see with --dry-run what it was given."

    def status(self, run: Run, job: str) -> Status:
        _check()
        found, said = self._get(f"{self.kind.resource}/{job}")
        pods, pods_said = self._get("pods", f"--selector={self.kind.label}={job}")
        items = (pods or {}).get("items", [])
        if found is None and "NotFound" in said:
            if items:
                return Status(RUNNING, f"is ending: {in_words(items, self.nodes)[1]}")
            return Status(ENDED, "was deleted", None if run.certified_steps() is not None else 130)
        if found is None or pods is None:
            return Status(UNKNOWN, f"{_words(said or pods_said)}. {self._advice(said or pods_said)}")
        conditions = {each["type"]: each for each in found.get("status", {}).get("conditions", [])}
        holding = {name: each for name, each in conditions.items() if each.get("status") == "True"}
        for name, code in OVER.items():
            if name in holding:
                return _ended(name, holding[name], code, items)
        if "Suspended" in holding:
            return Status(QUEUED, "suspended: a queue, or somebody, has yet to let it run")
        stuck, text = in_words(items, self.nodes)
        hint = f" (end it with phalanx cancel {run.in_shell})" if stuck else ""
        started = any(each.get("status", {}).get("phase") == "Running" for each in items)
        return Status(RUNNING if started and not stuck else QUEUED, text + hint)

    def _get(self, *words: str) -> tuple[Any, str]:
        """An object, or what was said instead."""
        done = self.kubectl("get", "--output=json", *words)
        return (None, done.stderr) if done.returncode else (json.loads(done.stdout), "")

    def cancel(self, run: Run, job: str) -> None:
        _check()
        by_hand = shlex.join(self.line("delete", f"{self.kind.resource}/{job}"))
        place.check_own(run, by_hand)
        kinds = self.kind.resource + (",services" if self._kind == "job" else "")
        wanted = f"app.kubernetes.io/instance={job},{RUN_LABEL}={_label(run.path)}"
        done = self.kubectl("delete", kinds, f"--selector={wanted}", "--wait=false", "--output=name")
        if done.returncode:
            raise CannotHere(f"Kubernetes does not end {job}: {_words(done.stderr)}. {self._advice(done.stderr)}")
        if not re.search(r"^\S+/\S+$", done.stdout, re.MULTILINE):
            raise CannotHere(
                f"no {self.kind.title} {job} there says that it was submitted from {run.path}. If it is this run's all "
                f"the same, end it yourself: {by_hand}"
            )

    def output(self, run: Run, job: str) -> Path:
        return run.path / self.word / f"{job}.out"

    @contextmanager
    def fetching(self, run: Run, job: str, keep_on: bool) -> Iterator[None]:
        _check()
        with PodLog(self.line, lambda: self._first(job), run.path, self.output(run, job), keep_on):
            yield

    def _first(self, job: str) -> Mapping[str, Any] | None:
        """The pod that speaks for all."""
        pods, _ = self._get("pods", f"--selector={self.kind.label}={job}")
        return first_of((pods or {}).get("items", []))


def _ended(name: str, condition: Mapping[str, Any], code: int, pods: list[Any]) -> Status:
    if code == 0:
        return Status(ENDED, name, 0)
    why = ": ".join(word for word in (condition.get("reason", ""), condition.get("message", "")) if word)
    codes = [
        state["terminated"]["exitCode"]
        for pod in pods
        for state in (each.get("state", {}) for each in pod.get("status", {}).get("containerStatuses", []))
        if state.get("terminated", {}).get("exitCode")
    ]
    codes.sort(key=lambda each: each not in VERDICTS)  # others were ended for it
    return Status(ENDED, f"{name}, {why}" if why else name, next(iter(codes), code))


def _label(run: Path) -> str:
    """By which a job says from which run's folder it was submitted."""
    return hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:40]


def _check() -> None:
    if shutil.which("kubectl") is None:
        raise CannotHere(
            "kubectl not found: this machine does not reach Kubernetes. Install it, or add --dry-run to see the YAML "
            "and hand that to kubectl create -f elsewhere."
        )


def _words(said: str) -> str:
    """kubectl's errors in one line."""
    lines = [re.sub(r"^(error: |Error from server( \(\w+\))?: )", "", line.strip()) for line in said.splitlines()]
    lines = [re.sub(r'^error when \w+ "STDIN": ', "", line) for line in lines if not re.match(r"[EWI]\d{4} ", line)]
    return "; ".join(dict.fromkeys(line.rstrip(".") for line in lines if line)) or "it does not say why"
