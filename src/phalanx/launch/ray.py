"""On Ray: a TorchTrainer whose workers are hosts, with a supervisor and its ranks on each.

Ray places the workers, and starts all of them again when it loses one, as often as it takes; each start goes on from
the run's folder. A rank that fails is its supervisor's to start again, and Ray hears nothing of it.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from phalanx.errors import CannotHere, WrongUse, closest
from phalanx.files import write_whole
from phalanx.folder_files import FOLDER_MODE, appending, count, make_folder, read_object
from phalanx.launch import place
from phalanx.launch.following import LOOK_SECONDS, Tail
from phalanx.launch.place import ENDED, RUNNING, Command, Place, Status
from phalanx.launch.ray_trainer import Fit, connected, imported, torch_trainer
from phalanx.launch.ray_worker import HostJob, trial
from phalanx.launch.stopping import ENDING, Stop, handled
from phalanx.run import Run, held, holder, short_name
from phalanx.verdict import Verdict
from phalanx.words import many

OPTIONS = ("address", "nodes", "ranks", "gpus")
MARGIN_SECONDS = 20.0
"""Beside the time that ranks have to save in: for Ray to notice that its workers are done."""
QUEUE_SECONDS = 10.0
"""A job that waits for nodes says so after so long."""


def trainer(
    task: str,
    *,
    run: str | Path | None = None,
    nodes: int = 1,
    ranks: int = 0,
    gpus: int = 0,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A TorchTrainer of Ray's that trains a task: ``fit()`` gives a Result with step, loss and held_out.

    ``ranks``: of each node; 0: as many as GPUs, or 1. ``options``: those of ``phalanx train``, by name.
    """
    imported()
    cluster = RayCluster(nodes=nodes, ranks=ranks or gpus or 1, gpus=gpus)
    made = Run.folder(run, short_name(task))
    path = made.path.resolve()
    command = Command(sys.executable, _words_of(task, gpus, settings, options), Path.cwd(), path, path.name, 0.0)
    return torch_trainer(cluster.job_of(command, _new_job(made)), nodes, cluster.each)


def trainable(
    task: str, *, ranks: int = 0, gpus: int = 0, settings: Mapping[str, Any] | None = None, **options: Any
) -> Any:
    """For Ray Tune: trains a task with each trial's settings on one node, and reports step, loss and held_out."""
    imported()
    from ray import tune

    each = RayCluster(ranks=ranks or gpus or 1, gpus=gpus)
    words = ("train", *_words_of(task, gpus, settings, options), "--on", f"local:{each.ranks}")
    given = {"words": words, "folder": str(Path.cwd())}
    group = tune.PlacementGroupFactory([each.each])
    return tune.with_resources(tune.with_parameters(trial, given=given), group)


def _words_of(task: str, gpus: int, settings: Mapping[str, Any] | None, options: Mapping[str, Any]) -> tuple[str, ...]:
    assignments = [f"{name}={value}" for name, value in (settings or {}).items()]
    given = {"device": "cuda" if gpus else "cpu", **options}
    return place.words_of({"task": task, "assignments": assignments, **given}, left_out=())


@dataclass(frozen=True, kw_only=True)
class RayCluster(Place):
    """Nodes of a Ray cluster, or a cluster on this machine for as long as the job lasts."""

    word: ClassVar[str] = "ray"
    job: ClassVar[str] = "[0-9]{1,9}"
    address: str = ""
    """As ``ray.init`` takes it; "": a cluster of our own."""
    text: str = "ray"

    @classmethod
    def parse(cls, options: Mapping[str, str], rest: str) -> Self:
        for name in (*options, *filter(None, [rest])):
            if name not in OPTIONS:
                raise WrongUse(f"--on ray: {name!r} is not one of its options; {closest(name, OPTIONS)}")
        nodes, gpus = place.count(options, "nodes", 1), place.count(options, "gpus", 0, least=0)
        ranks = place.count(options, "ranks", gpus or 1)
        text = ",".join(f"{name}={value}" for name, value in options.items())
        return cls(
            nodes=nodes, gpus=gpus, ranks=ranks, address=options.get("address", ""), text=f"ray:{text}".rstrip(":")
        )

    def preview(self, command: Command) -> str:
        scaling = f"num_workers={self.nodes}, resources_per_worker={self.each}, placement_strategy='SPREAD'"
        return "\n".join(
            [
                f"ray.init(address={self.address or 'local'!r})",
                "TorchTrainer(",
                f"    scaling_config=ScalingConfig({scaling}, use_gpu={self.gpus > 0}),",
                f"    run_config=RunConfig(name={command.run.name!r}, storage_path={str(command.run.parent)!r},",
                "        failure_config=FailureConfig(max_failures=-1)),",
                ")",
                f"on each worker: {' '.join(command.on(self.ranks))}",
            ]
        )

    @property
    def each(self) -> dict[str, int]:
        """What Ray is to reserve for each host."""
        return {"CPU": self.ranks, **({"GPU": self.gpus} if self.gpus else {})}

    def train(self, command: Command, check: Callable[[], object]) -> Verdict:
        run = Run(command.run)
        with ExitStack() as stack:
            try:
                imported()
                check()
                stack.enter_context(connected(self.address, self.nodes * self.ranks))
                self._check_room()
            except BaseException:
                with suppress(OSError):  # it holds a run that goes on
                    run.path.rmdir()
                raise
            job = _new_job(run)
            host = self.job_of(command, job)
            stack.enter_context(held(Path(host.files), purpose="as Ray's driver", within=run.path))
            place.note(run, self.text, job)
            print(f" submit  Ray job {job}: {many(self.nodes, 'worker')} of {self._words()}", flush=True)
            code, why = self._follow(run, host, command.grace)
            ended = json.dumps({"code": code, "why": why}) + "\n"
            write_whole(Path(host.files) / "end.json", ended, within=run.path)
        if code == 0:
            return Verdict(True, f"ray job {job} is done")
        again = self.again(run)
        if code == 130:
            return Verdict(False, f"ray job {job} stopped: {why}", next=f"Go on with {again}", code=code)
        return Verdict(
            False, f"ray job {job} ended: {why}", [f"what it printed is in {self.output(run, job)}"],
            next=f"Mend what it says there, then {again}", code=code,
        )  # fmt: skip

    def _words(self) -> str:
        gpus = f" and {many(self.gpus, 'GPU')}" if self.gpus else ""
        return f"{many(self.ranks, 'CPU')}{gpus}"

    def job_of(self, command: Command, job: str) -> HostJob:
        """What a worker has to know."""
        files = command.run / "ray" / job
        return HostJob(tuple(command.on(self.ranks)[3:]), str(command.folder), str(command.run), str(files))

    def _follow(self, run: Run, job: HostJob, grace: float) -> tuple[int, str]:
        """The exit code, and why it is that."""
        stop, fit = Stop(grace, lambda: bool(holder(run.path))), Fit(job, self.nodes, self.each)
        merged = _Merged(job, self.nodes)

        def heard(number: int, frame: object) -> None:
            if stop.heard(number):
                job.ask_to_stop(130)
                print(stop.told(), file=sys.stderr, flush=True)

        with handled(ENDING, heard):  # after ray.init, which has a handler of its own
            fit.start()
            silent, said = time.monotonic(), ""
            while fit.is_alive():
                if merged.show() or holder(run.path):
                    silent = time.monotonic()
                elif time.monotonic() - silent > QUEUE_SECONDS:
                    silent = time.monotonic()
                    if (waits := self._waits()) not in ("", said):
                        said = waits
                        print(f"  queue  {said}", flush=True)
                if not stop.asked and job.asked_to_stop() is not None:
                    stop.heard(signal.SIGTERM)
                if stop.asked and (stop.cut_short or time.monotonic() > stop.deadline + MARGIN_SECONDS):
                    return 130, stop.cut_short or f"it was asked to, and Ray's workers did not end in {grace:g} s"
                time.sleep(LOOK_SECONDS)
        merged.close()
        return fit.ended()

    def _waits(self) -> str:
        """For what, if Ray has not placed its workers yet."""
        import ray

        if all(group["state"] != "PENDING" for group in ray.util.placement_group_table().values()):
            return ""
        free = ray.available_resources()
        least = ", ".join(f"{free.get(name, 0):g} {name}" for name in self.each)
        return f"waits for {many(self.nodes, 'worker')} of {self._words()}; {least} free in the cluster"

    def _check_room(self) -> None:
        """Refuse what would wait for ever."""
        import ray
        from ray._private.state import state

        grows = not self.address.startswith("ray://") and state.get_max_resources_from_cluster_config()
        if grows:  # by itself, and Ray knows how far
            return
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        room = sum(min(int(node.get(name, 0) // number) for name, number in self.each.items()) for node in nodes)
        if room < self.nodes:
            has = "; ".join(", ".join(f"{node.get(name, 0):g} {name}" for name in self.each) for node in nodes)
            raise CannotHere(
                f"--on {self.text} asks for {many(self.nodes, 'worker')} of {self._words()} each, and the cluster has "
                f"room for {room}: its nodes have {has}. Ask for fewer nodes, ranks or gpus, or add nodes to it."
            )

    def status(self, run: Run, job: str) -> Status:
        files = run.path / "ray" / job
        if driver := holder(files, within=run.path):
            return Status(RUNNING, driver)
        try:
            found = read_object(run.path, files / "end.json")
            return Status(ENDED, str(found.get("why")), count(found, "code", files / "end.json", most=255))
        except FileNotFoundError:
            return Status(ENDED, "its driver, which holds its workers, was lost")

    def cancel(self, run: Run, job: str) -> None:
        HostJob((), "", str(run.path), str(run.path / "ray" / job)).ask_to_stop(130)

    def output(self, run: Run, job: str) -> Path:
        return run.path / "ray" / job / "out"


class _Merged:
    """What all workers print, in one file, and on the screen: any of them may have rank 0."""

    def __init__(self, job: HostJob, workers: int) -> None:
        self.folder, self.path = Path(job.run), Path(job.files) / "out"
        self.parts = [Tail(self.folder, job.output(name)) for name in ("all", *range(workers))]
        self.whole = Tail(self.folder, self.path)

    def show(self) -> bool:
        """Whether there was anything."""
        added = [line for part in self.parts for line in part.lines()]
        if added:
            with appending(self.folder, self.path) as file:
                file.write(("\n".join(added) + "\n").encode(errors="replace"))
        return self.whole.show()

    def close(self) -> None:
        self.show()
        self.whole.close()


def _new_job(run: Run) -> str:
    """A number that no job of this run has had."""
    number = 1
    while True:
        try:
            make_folder(run.path, run.path / "ray")
            (run.path / "ray" / str(number)).mkdir(FOLDER_MODE)
            return str(number)
        except FileExistsError:
            number += 1
