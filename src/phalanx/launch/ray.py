"""On Ray: a TorchTrainer whose workers are hosts, with a supervisor and its ranks on each.

Ray places the workers, and starts all of them again when it loses one, as often as it takes; each start goes on from the
run's folder. A rank that fails is its supervisor's to start again, and Ray hears nothing of it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from phalanx.errors import CannotHere, WrongUse, closest
from phalanx.files import write_whole
from phalanx.launch import place
from phalanx.launch.following import LOOK_SECONDS, Tail
from phalanx.launch.place import ENDED, RUNNING, Command, Place, Status
from phalanx.launch.ray_worker import HostJob, ending, trial, work
from phalanx.launch.stopping import ENDING, Stop, handled
from phalanx.redact import redact
from phalanx.run import Run, held
from phalanx.verdict import Verdict
from phalanx.words import many

OPTIONS = ("address", "nodes", "ranks", "gpus")
CONNECT_SECONDS = 10.0
MARGIN_SECONDS = 20.0
"""Beside the time that ranks have to save in: for Ray to notice that its workers are done."""
QUEUE_SECONDS = 10.0
"""A job that waits for nodes says so after so long."""
STORE_BYTES = 100 << 20
"""Of shared memory for a cluster of our own: ranks do not send anything through Ray."""
QUIET = {
    "RAY_TRAIN_V2_ENABLED": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
}  # fmt: skip
"""What Ray is told through the environment, unless it says otherwise already."""
OURS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_METRICS_ENABLED": "0"}
"""And where the cluster is our own."""


@dataclass(frozen=True, kw_only=True)
class RayCluster(Place):
    """Nodes of a Ray cluster, or a cluster on this machine for as long as the job lasts."""

    word: ClassVar[str] = "ray"
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

    def train(self, command: Command) -> Verdict:
        _imported()
        run = Run(command.run)
        with ExitStack() as stack:
            try:
                stack.enter_context(self._connected())
                self._check_room()
            except BaseException:
                with suppress(OSError):  # it holds a run that goes on
                    run.path.rmdir()
                raise
            job = _new_job(run)
            host = self.job_of(command, job)
            stack.enter_context(held(Path(host.files), purpose="as Ray's driver"))
            place.note(run, self.text, job)
            print(f" submit  Ray job {job}: {many(self.nodes, 'worker')} of {self._words()}", flush=True)
            code, why = self._follow(run, host, command.grace)
            write_whole(Path(host.files) / "end.json", json.dumps({"code": code, "why": why}) + "\n")
        if code == 0:
            return Verdict(True, f"ray job {job} is done", [f"weights: {run.weights_path}"])
        return Verdict(
            False, f"ray job {job} ended: {why}", [f"what it printed is in {host.output(0)}"],
            next=f"Mend what it says there, then phalanx train --resume --run {run.path} --on {self.text}", code=code,
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
        stop, fit = Stop(grace), _Fit(self, job)
        tails = [Tail(job.output(number)) for number in range(self.nodes)]

        def heard(number: int, frame: object) -> None:
            if stop.heard(number):
                job.ask_to_stop(130)
                print(stop.told(), file=sys.stderr, flush=True)

        with handled(ENDING, heard):  # after ray.init, which has a handler of its own
            fit.start()
            silent, said = time.monotonic(), ""
            while fit.is_alive():
                if any([tail.show() for tail in tails]) or _holder(run.path):
                    silent = time.monotonic()
                elif time.monotonic() - silent > QUEUE_SECONDS and (waits := self._waits()) != said:
                    said = waits
                    print(f"  queue  {said}", flush=True)
                if stop.asked and (stop.cut_short or time.monotonic() > stop.deadline + MARGIN_SECONDS):
                    return 130, stop.cut_short or f"its workers did not end within {grace:g} s"
                time.sleep(LOOK_SECONDS)
        for tail in tails:
            tail.close()
        return fit.ended()

    def _waits(self) -> str:
        import ray

        free = ray.available_resources()
        least = ", ".join(f"{free.get(name, 0):g} {name}" for name in self.each)
        return f"waits for {many(self.nodes, 'worker')} of {self._words()}; {least} free in the cluster"

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Connected to the cluster, or with one of our own, which ends with this."""
        import ray

        options: dict[str, Any] = {"address": self.address or "local", "log_to_driver": False}
        if not self.address:
            os.environ.update(OURS)
            options |= {"num_cpus": self.nodes * self.ranks, "include_dashboard": False}
            options |= {"object_store_memory": STORE_BYTES}
        elif self.address != "auto":
            _reach(self.address)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ray.init(**options, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise CannotHere(
                f"no Ray cluster at address={self.address or 'local'}: {_line(error)}. Give the address that ray start "
                "printed, auto on a node of the cluster, or none for a cluster on this machine."
            ) from None
        try:
            yield
        finally:
            ray.shutdown()

    def _check_room(self) -> None:
        """Refuse what would wait for ever."""
        import ray
        from ray._private.state import state

        if state.get_max_resources_from_cluster_config():  # it grows by itself, and Ray knows how far
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
        if driver := _holder(files):
            return Status(RUNNING, driver)
        try:
            found = json.loads((files / "end.json").read_text())
            return Status(ENDED, str(found["why"]), int(found["code"]))
        except (OSError, ValueError, KeyError):
            return Status(ENDED, "its driver, which holds its workers, was lost")

    def cancel(self, run: Run, job: str) -> None:
        HostJob((), "", str(run.path), str(run.path / "ray" / job)).ask_to_stop(130)

    def output(self, run: Run, job: str) -> Path:
        return HostJob((), "", str(run.path), str(run.path / "ray" / job)).output(0)


class _Fit(threading.Thread):
    """TorchTrainer's ``fit``, aside: on the main thread Ctrl-C would be Ray's, which ends workers without a word."""

    def __init__(self, cluster: RayCluster, job: HostJob) -> None:
        super().__init__(name="ray", daemon=True)
        self.cluster, self.job = cluster, job
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.result = _torch_trainer(self.cluster, self.job).fit()
        except BaseException as error:
            self.error = error

    def ended(self) -> tuple[int, str]:
        if self.error is not None:
            return 1, f"Ray gave up: {_line(self.error)}"
        code = self.job.asked_to_stop() or self.result.return_value
        return code, "it was asked to" if code == 130 else f"exit code {code}"


def _imported() -> None:
    """Ray, told to be quiet."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray.train
        import ray.tune  # noqa: F401
    except ImportError as error:
        raise CannotHere(f"Ray Train is not installed ({error}). Install it: pip install 'phalanx[ray]'") from None


def _torch_trainer(cluster: RayCluster, job: HostJob) -> Any:
    from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback
    from ray.train.backend import BackendConfig
    from ray.train.torch import TorchTrainer

    class NoProcessGroup(BackendConfig):
        """Workers do not import torch, and make no group: ranks are not theirs."""

        backend = "none"

    class LossesTold(UserCallback):
        """Which worker was lost stands among what the job prints."""

        def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:
            with job.output(0).open("a") as output:
                for number, error in worker_exceptions.items():
                    output.write(f"  again  worker {number} was lost: {_line(error)}; Ray starts all of them again\n")

    class Trainer(TorchTrainer):
        """One whose failures are told as ``phalanx train`` tells them."""

        def fit(self) -> Any:
            result = super().fit()
            code = job.asked_to_stop() or result.return_value
            if code == 130:
                raise KeyboardInterrupt
            if code:
                kind = {2: WrongUse, 3: CannotHere}.get(code, RuntimeError)
                raise kind(ending(job))
            return result

    run = Path(job.run)
    scaling = ScalingConfig(
        num_workers=cluster.nodes, use_gpu=cluster.gpus > 0, resources_per_worker=dict(cluster.each),
        placement_strategy="SPREAD",
    )  # fmt: skip
    lasting = RunConfig(
        name=run.name, storage_path=str(run.parent), failure_config=FailureConfig(max_failures=-1),
        callbacks=[LossesTold()],
    )  # fmt: skip
    return Trainer(
        work, train_loop_config=asdict(job), torch_config=NoProcessGroup(), scaling_config=scaling, run_config=lasting
    )


def _new_job(run: Run) -> str:
    """A number that no job of this run has had."""
    number = 1
    while True:
        try:
            (run.path / "ray" / str(number)).mkdir(parents=True)
            return str(number)
        except FileExistsError:
            number += 1


def _holder(folder: Path) -> str:
    """Who holds it at this moment: ``process 12 on node1``; "": nobody."""
    with suppress(OSError), (folder / "lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return " ".join(file.read(200).split()[:4]) or "another process"
    return ""


def _reach(address: str) -> None:
    """Ray waits long for who does not answer."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not (host and port.isdecimal()):
        raise WrongUse(f"--on ray: address={address} is not auto, HOST:PORT or ray://HOST:PORT. Write it like one.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise CannotHere(
            f"nobody answers at address={address}: {getattr(error, 'strerror', None) or error}. Give the address that "
            "ray start printed, or leave it out for a cluster on this machine."
        ) from None


def _line(error: BaseException) -> str:
    """An error of Ray's in one line: without tracebacks, and the last cause if there are several."""
    cause = getattr(error, "worker_failures", None) or {}
    for inner in cause.values():
        return _line(inner)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return redact((lines[0] if lines else type(error).__name__).rstrip(".")[:300])
