"""On Kubernetes: what kubectl is given, what it says, and runs in pods as their controllers would start them."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from phalanx import Run, WrongUse
from phalanx.errors import CannotHere
from phalanx.launch import standing
from phalanx.launch.kubernetes import Kubernetes
from phalanx.launch.place import Command, note, place_of
from phalanx.train.doctor_elsewhere import doctor_elsewhere
from tests.hosts import Hosts, needs_namespaces
from tests.kubernetes import IMAGE, KubernetesCluster, needs_kubectl, needs_schemas
from tests.ranks import Ranks
from tests.test_cli import phalanx
from tests.test_docs import commands
from tests.test_recovery import TASK


def checked() -> None:
    """A job that has been checked already."""


ROOT = Path(__file__).parents[2]


def place(**options: object) -> Kubernetes:
    given = {"image": IMAGE, "volume": "runs:/shared", **options}
    made = place_of("kubernetes:" + ",".join(f"{name.replace('_', '-')}={value}" for name, value in given.items()))
    assert isinstance(made, Kubernetes)
    return made


def command_of(folder: Path, *words: str, task: str = "gpt") -> Command:
    return Command("/usr/bin/python", (task, *words), folder, folder / "run", "run", 5.0)


def slow(folder: Path, *words: str) -> Command:
    words = ("--set", "precision=float64", "--layout", "dp=2", "--save-steps", "10", "--device", "cpu", *words)
    return command_of(folder, *words, task=str(folder / "slow.py"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "slow.py").write_text(TASK)
    (tmp_path / "run").mkdir()
    return tmp_path


# What pods are given.


@pytest.mark.parametrize("word", ["$", "$$", "$(HOME)", "$$(HOME)", "a$b$$c$$$", "$$$(HOME)$", "'$(it)'s", "${HOME}"])
def test_words_arrive_as_they_were_typed(tmp_path: Path, word: str) -> None:
    from tests.kubernetes import _expanded

    sent = place().pods(command_of(tmp_path, "--set", f"name={word}")).words
    assert f"name={word}" in [_expanded(each, {"HOME": "/root", "it": "no"}) for each in sent]


def test_a_jobset_says_what_is_asked_for(tmp_path: Path) -> None:
    made = place(nodes=4, gpus=8, memory="512Gi", rdma="rdma/ib=2", shm="64Gi", node_selector="pool=big+zone=a")
    assert (made.nodes, made.ranks) == (4, 8)
    (found,) = yaml.safe_load_all(made.preview(command_of(tmp_path, "--set", "name=$(it)'s")))
    assert re.fullmatch("[0-9a-f]{40}", found["metadata"]["labels"]["phalanx.dev/run"])
    name = found["metadata"]["name"]
    assert re.fullmatch("run-[0-9a-f]{4}", name)
    job = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completions"], job["completionMode"]) == (4, "Indexed")
    pod = job["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 5
    assert pod["nodeSelector"] == {"pool": "big", "zone": "a"}
    container = pod["containers"][0]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "memory": "512Gi", "rdma/ib": "2"}
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert shlex.join(container["command"]) == (
        "python -m phalanx train gpt --set 'name=$$(it)'\"'\"'s' --run /shared/run --on local:8 --resume "
        f"--min-nodes 4 --max-nodes 4 --meet {name}-workers-0-0.{name}:29400"
    )
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}} in pod["volumes"]
    assert {"name": "run", "mountPath": "/shared"} in container["volumeMounts"]


def test_a_volume_is_mounted_where_the_run_lies_unless_it_is_said(tmp_path: Path) -> None:
    pods = place(volume="runs").pods(command_of(tmp_path))
    assert (pods.claim, pods.mount) == ("runs", str(tmp_path))
    assert f"--run {tmp_path}/run" in " ".join(pods.words)
    pods = place(volume=f"runs:{tmp_path.parent}").pods(command_of(tmp_path))
    assert f"--run {tmp_path}/run" in " ".join(pods.words)


def test_a_name_is_short_and_one_that_dns_takes(tmp_path: Path) -> None:
    long = Command("python", ("gpt",), tmp_path, tmp_path / ("0_Über" + "long" * 30), "x", 30.0)
    for kind in ("jobset", "job", "trainjob", "pytorchjob"):
        assert re.fullmatch("[a-z][a-z0-9-]{,49}", place(kind=kind).pods(long).name)


def test_who_asks_for_fewer_nodes_gets_them(tmp_path: Path) -> None:
    words = place(nodes=4).pods(command_of(tmp_path, "--min-nodes", "2")).words
    assert words.count("--min-nodes") == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nodes=2", "pods need an image"),
        ("image=x", "without a volume the run would end with its pod"),
        ("image=x,volume=runs:shared", "cannot be mounted at shared"),
        ("image=x,volume=a,nodes=0", "nodes=0 is no number"),
        ("image=x,volume=a,kind=pod", "kind=pod is not known"),
        ("image=x,volume=a,mem=5Gi", "'mem' is not one of its options; .*memory"),
        ("image=x,volume=a,memory=lots", "memory=lots is no quantity"),
        ("image=x,volume=a,rdma=ib", "rdma=ib names no device"),
        ("image=x,volume=a,node-selector=big", "node-selector=big is none"),
        ("image=x,volume=a,kind=trainjob,secret=b", "secret= is not a TrainJob's to say"),
        ("image=x,shm", "shm needs a value"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(WrongUse, match=told):
        place_of(f"kubernetes:{text}").preview(command_of(tmp_path))  # type: ignore[union-attr]


def test_without_a_volume_there_is_a_store_and_a_key(tmp_path: Path) -> None:
    stored = command_of(tmp_path, "--checkpoints", "s3://bucket/gpt")
    assert "persistentVolumeClaim" not in place_of(f"kubernetes:image={IMAGE}").preview(stored)  # type: ignore[union-attr]
    with pytest.raises(WrongUse, match="without a volume pods share no key"):
        place_of(f"kubernetes:image={IMAGE},nodes=2").preview(stored)  # type: ignore[union-attr]
    text = place_of(f"kubernetes:image={IMAGE},nodes=2,secret=gpt").preview(stored)  # type: ignore[union-attr]
    assert "- secretRef:\n" in text


# What kubectl says.


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(3, tmp_path_factory.mktemp("hosts")) as made:
        yield made


Clusters = Callable[..., KubernetesCluster]


@pytest.fixture
def clusters(
    tmp_path_factory: pytest.TempPathFactory, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Clusters]:
    """Makes one with some kinds, which kubectl is then led to."""
    made: list[KubernetesCluster] = []

    def cluster(**more: tuple[str, ...]) -> KubernetesCluster:
        made.append(KubernetesCluster(tmp_path_factory.mktemp("kubernetes"), hosts, **more).__enter__())
        for name, value in made[-1].environment.items():
            monkeypatch.setenv(name, value)
        return made[-1]

    yield cluster
    for each in made:
        each.__exit__(None, None, None)


def until(holds: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not in {seconds:g} s"
        time.sleep(0.2)


def fake_kubectl(folder: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> Path:
    """A program of that name, which says this; the file that it writes its words to."""
    (folder / "bin").mkdir(exist_ok=True)
    tool = folder / "bin" / "kubectl"
    tool.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$*\" >> {folder}/told\nprintf '%s' '{said}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    return folder / "told"


def test_a_job_of_another_run_is_not_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a folder says to be its job: the job itself says which folder it was submitted from."""
    run = Run(folder / "run")
    note(run, "kubernetes:image=x,namespace=team", "gpt-001-ab12")
    told = fake_kubectl(folder, monkeypatch, "No resources found")
    place = place_of("kubernetes:image=x,namespace=team")
    assert place is not None
    with pytest.raises(CannotHere, match=r"no JobSet gpt-001-ab12 there says that it was submitted from .*/run\. .*"
                       r"kubectl --namespace=team delete jobsets\.jobset\.x-k8s\.io/gpt-001-ab12$"):  # fmt: skip
        place.cancel(run, "gpt-001-ab12")
    label = hashlib.sha256(os.fsencode((folder / "run").resolve())).hexdigest()[:40]
    assert told.read_text() == (
        "--namespace=team delete jobsets.jobset.x-k8s.io --selector=app.kubernetes.io/instance=gpt-001-ab12,"
        f"phalanx.dev/run={label} --wait=false --output=name\n"
    )
    fake_kubectl(folder, monkeypatch, "jobset.jobset.x-k8s.io/gpt-001-ab12")
    place.cancel(run, "gpt-001-ab12")


def test_a_cluster_that_does_not_answer_is_said_to_be_silent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_kubectl(folder, monkeypatch, "")
    (folder / "bin" / "kubectl").write_text("#!/bin/sh\nexec sleep 600\n")
    monkeypatch.setattr("phalanx.launch.kubernetes.ANSWER_SECONDS", 0.2)
    found = place().status(Run(folder / "run"), "job")
    assert found.state == "unknown"
    assert found.detail.startswith("kubectl does not answer in 0.2 s")


@needs_kubectl
def test_without_a_cluster_it_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"clusters": [{"name": "a", "cluster": {"server": "http://127.0.0.1:9"}}], "current-context": "a"}
    config["contexts"] = [{"name": "a", "context": {"cluster": "a"}}]
    (folder / "config").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(folder / "config"))
    with pytest.raises(CannotHere, match=r"refused.*kubectl cluster-info reaches"):
        place().submit(command_of(folder))
    assert not list((folder / "run").glob("*"))  # and the folder itself goes with who made it


def test_without_kubectl_it_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CannotHere, match=r"kubectl not found.*--dry-run"):
        place().submit(command_of(folder))


@needs_kubectl
@needs_schemas
@needs_namespaces
def test_what_a_cluster_does_not_have_is_named(clusters: Clusters, folder: Path) -> None:
    clusters(kinds=("pods", "services", "jobs"))
    with pytest.raises(CannotHere, match=r'no matches for kind "JobSet".*has no JobSet.*use kind=job'):
        place().submit(command_of(folder))
    with pytest.raises(CannotHere, match=r'namespaces "other" not found.*Give namespace='):
        place(kind="job", namespace="other").submit(command_of(folder))


@needs_kubectl
@needs_schemas
@needs_namespaces
def test_a_pod_that_waits_is_named(clusters: Clusters, folder: Path) -> None:
    clusters()
    run = Run(folder / "run")
    for more, told in (
        ({"image": "example.org/other:1"}, "its image cannot be pulled: failed to pull example.org/other:1: not found"),
        ({"gpus": 8}, r"fits on no node: 0/3 nodes are available: insufficient nvidia.com/gpu \(end it with"),
    ):
        run.path.mkdir(exist_ok=True)
        made = place(**more)
        job = made.submit(command_of(folder))
        until(lambda: "pod " in made.status(run, job).detail, 20)  # noqa: B023
        status = made.status(run, job)
        assert status.state == "queued"
        assert re.search(told, status.detail)
        with pytest.raises(WrongUse, match="is trained by"):
            place(nodes=2).submit(command_of(folder))
        assert "asked kubernetes job" in standing.cancel(run)
        until(lambda: made.status(run, job).state == "ended", 20)  # noqa: B023
        assert (made.status(run, job).detail, made.status(run, job).code) == ("was deleted", 130)


@needs_kubectl
@needs_schemas
@needs_namespaces
def test_an_older_trainer_is_given_what_it_knows(clusters: Clusters, folder: Path) -> None:
    cluster = clusters(unknown=("runtimePatches",))
    job = place(kind="trainjob", nodes=2, image="example.org/other:1").submit(command_of(folder))
    (made,) = cluster.objects.values()
    assert made["metadata"]["name"] == job
    assert "podTemplateOverrides" in made["spec"]
    assert "podTemplateOverrides" in (folder / "run" / "kubernetes" / f"{job}.yaml").read_text()


# What pods run.


def weights(run: Path) -> str:
    (found,) = re.findall('"hash": "([^"]+)"', (run / "final" / "certificate.json").read_text())
    return found


def on(kind: str, folder: Path, nodes: int = 2, **more: str) -> Kubernetes:
    return place(kind=kind, nodes=nodes, volume=f"runs:{folder}", **more)


@needs_kubectl
@needs_schemas
@needs_namespaces
def test_a_jobset_is_created_and_followed_to_its_end(
    clusters: Clusters, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clusters()
    made = on("jobset", folder, namespace="team")
    verdict = made.train(slow(folder, "--steps", "12"), checked)
    said = capsys.readouterr().out
    assert verdict.exit_code == 0, said
    for words in ("submit  JobSet run-", "step 12/12", "certificate: 12 steps"):
        assert words in said
    standing.show_logs(Run(folder / "run"), keep_on=False)
    assert "certificate: 12 steps" in capsys.readouterr().out


@pytest.mark.every
@needs_kubectl
@needs_schemas
@needs_namespaces
@pytest.mark.parametrize("kind", ["job", "trainjob", "pytorchjob"])
def test_so_are_other_kinds(clusters: Clusters, folder: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    clusters()
    verdict = on(kind, folder).train(slow(folder, "--steps", "12"), checked)
    said = capsys.readouterr().out
    assert verdict.exit_code == 0, said
    assert "certificate: 12 steps" in said


@pytest.mark.every
@needs_kubectl
@needs_schemas
@needs_namespaces
@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_the_doctor_goes_there(
    clusters: Clusters, folder: Path, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters()
    monkeypatch.chdir(folder)
    names = ("on", "run", "task", "timeout", "max_nodes", "min_nodes", "meet", "host", "interface", "layout", "device")
    for _ in range(2):
        verdict = doctor_elsewhere(dict.fromkeys(names), on(kind, folder))
        said = capsys.readouterr().out
        assert verdict.exit_code == 0, said
        assert "2 ranks met, and each computed what it should" in said
        assert not list(folder.glob("runs/*"))


@pytest.mark.every
@needs_kubectl
@needs_schemas
@needs_namespaces
def test_the_first_pod_comes_again_elsewhere_and_the_run_goes_on(
    clusters: Clusters, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, run = clusters(), Run(folder / "run")
    following = Following(on("jobset", folder), slow(folder, "--steps", "150", "--set", "pause=0.05"))
    until(lambda: reached(run, 15))
    first = cluster.node_of(0)
    cluster.lose(first)
    assert following.ended() == 0, capsys.readouterr().out
    assert cluster.node_of(0) != first
    assert len({pod.node for pod in cluster.pods}) == 3
    alone = phalanx("train", *slow(folder, "--steps", "150").words, "--on", "local:2", "--run", "alone", cwd=folder)
    assert alone.returncode == 0, alone.stderr
    assert weights(run.path) == weights(folder / "alone")


@pytest.mark.every
@needs_kubectl
@needs_schemas
@needs_namespaces
def test_a_job_that_is_cancelled_saves_and_can_go_on(
    clusters: Clusters, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clusters()
    run = Run(folder / "run")
    following = Following(on("job", folder), slow(folder, "--steps", "2000", "--set", "pause=0.05"))
    until(lambda: reached(run, 3))
    standing.cancel(run)
    assert following.ended() == 130
    assert "saved up to step" in capsys.readouterr().out
    made = on("job", folder)
    job = made.submit(slow(folder, "--steps", "20"))
    assert job.endswith("-2")


@pytest.mark.every
@needs_kubectl
@needs_schemas
@needs_namespaces
def test_a_verdict_ends_the_job(clusters: Clusters, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clusters()
    verdict = on("jobset", folder, nodes=1).train(slow(folder, "--steps", "12", "--bad", "nonsense"), checked)
    assert verdict.exit_code == 2
    assert "PodFailurePolicy: pod run-" in verdict.summary


class Following:
    """A job that is followed by a thread."""

    def __init__(self, made: Kubernetes, command: Command) -> None:
        self.code: int | None = None
        self._thread = threading.Thread(target=self._train, args=(made, command))
        self._thread.start()

    def _train(self, made: Kubernetes, command: Command) -> None:
        self.code = made.train(command, checked).exit_code

    def ended(self) -> int | None:
        self._thread.join(300)
        return self.code


def reached(run: Run, step: int) -> bool:
    return run.events_path(0).exists() and any(event["step"] >= step for event in run.events(0, "step"))


# What users copy.


def test_the_commands_of_the_page_are_described(tmp_path: Path) -> None:
    found = commands(ROOT / "docs" / "kubernetes.md")
    assert len(found) >= 6
    for words in found[:1]:
        done = phalanx(*words[1:], "--dry-run", cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert "\nkind: JobSet\n" in done.stdout
    for words in found:
        made = place_of(words[words.index("--on") + 1])
        assert made is not None
        assert "\nkind: " in made.preview(command_of(tmp_path, *words[2:]))


@pytest.mark.every
def test_all_commands_of_the_page_are_described(tmp_path: Path) -> None:
    for words in commands(ROOT / "docs" / "kubernetes.md"):
        done = phalanx(*words[1:], "--dry-run", cwd=ROOT)
        assert done.returncode == 0, done.stderr


@needs_schemas
def test_the_example_is_what_the_page_s_first_command_creates(tmp_path: Path) -> None:
    from tests.kubernetes import wrong_with

    text = (ROOT / "examples" / "kubernetes" / "unet.yaml").read_text()
    claim, jobset = yaml.safe_load_all(text)
    assert not wrong_with(claim)
    assert not wrong_with(jobset)
    words = commands(ROOT / "docs" / "kubernetes.md")[0]
    made = place_of(words[words.index("--on") + 1])
    assert isinstance(made, Kubernetes)
    command = Command("", ("examples/unet.py", "--device", "cpu"), tmp_path, tmp_path / "unet", "unet", 30.0)
    name = made.pods(command).name
    found = yaml.safe_load(made.preview(command).replace(name, "unet"))
    del found["metadata"]["labels"]["phalanx.dev/run"]  # of the folder that it is submitted from
    assert found == jobset


def test_the_dockerfile_installs_what_there_is() -> None:
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    known = {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT"}
    made = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    assert {word for word, _ in made} <= known
    for word, rest in made:
        if word == "COPY":
            assert all((ROOT / source).exists() for source in rest.split()[:-1]), rest
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    minor = re.fullmatch(r"python:3\.(\d+)-slim", made[0][1])
    assert minor is not None
    assert int(minor[1]) >= int(project["requires-python"].removeprefix(">=3."))
    arguments = dict(rest.split("=", 1) for word, rest in made if word == "ARG")
    assert set(arguments["EXTRAS"].strip("[]").split(",")) <= set(project["optional-dependencies"])
    assert made[-1] == ["ENTRYPOINT", '["python", "-m", "phalanx"]']
    users = [rest for word, rest in made if word == "USER"]
    assert users == ["phalanx"]
    installed = next(rest for word, rest in made if word == "RUN" and rest.startswith("pip install"))
    assert "--constraint constraints.txt" in installed
    kept = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    assert kept >= {source for word, rest in made if word == "COPY" for source in rest.split()[:-1]}


def segmented(layout: str) -> dict[str, float]:
    from examples.unet import Cells

    import phalanx as module

    task = Cells(steps=25, size=16, pictures=200, global_batch=16, learning_rate=2e-2, precision="float64")
    with module.Engine(task, module.Layout.parse(layout), device="cpu") as engine:
        for batch in engine.batches():
            engine.step(batch)
        return engine.evaluate()


def test_the_unet_learns_the_same_on_two_ranks(ranks: Ranks) -> None:
    one = segmented("dp=1")
    assert one["iou"] > 0.3
    for layout in ("dp=2", "fsdp=2"):
        for found in ranks(2, segmented, layout):
            assert found["iou"] == pytest.approx(one["iou"], abs=1e-6)
            assert found["loss"] == pytest.approx(one["loss"], rel=1e-9)
