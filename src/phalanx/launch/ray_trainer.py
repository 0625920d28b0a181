"""Ray, told to be quiet: a cluster to connect to or to start, and a TorchTrainer whose workers are hosts."""

from __future__ import annotations

import importlib
import logging
import os
import socket
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phalanx.errors import REFUSALS, CannotHere, WrongUse
from phalanx.launch.ray_worker import HostJob, work
from phalanx.redact import redact
from phalanx.run import Run

CONNECT_SECONDS = 10.0
FRUITLESS = 3
"""So many times in a row workers may be lost without a step more than before."""
STORE_BYTES = 100 << 20
"""Of shared memory for a cluster of our own: ranks do not send anything through Ray."""
QUIET = {
    "RAY_TRAIN_V2_ENABLED": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
}  # fmt: skip
"""What Ray is told through the environment, unless it says otherwise already."""
OURS = {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_METRICS_ENABLED": "0", "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}  # fmt: skip
"""And where the cluster is our own: processes that Ray starts in advance are not those that Train's workers run in."""


def imported() -> None:
    """Ray, told to be quiet."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray.train  # noqa: F401
    except ImportError as error:
        raise CannotHere(f"Ray Train is not installed ({error}). Install it: pip install 'phalanx[ray]'") from None


@contextmanager
def connected(address: str, cpus: int) -> Iterator[None]:
    """Connected to the cluster, or with one of our own, which ends with this."""
    if address not in ("", "auto"):
        _reach(address)
    import ray

    options: dict[str, Any] = {"address": address or "local", "log_to_driver": False}
    if not address:
        os.environ.update(OURS)
        options |= {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    trains = threading.Thread(target=importlib.import_module, args=("ray.train.torch",), daemon=True)
    trains.start()  # it takes as long as a cluster needs to begin
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(**options, logging_level=logging.ERROR)
            trains.join()
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise CannotHere(
            f"no Ray cluster at address={address or 'local'}: {line(error)}. Give the address that ray start "
            "printed, auto on a node of the cluster, or none for a cluster on this machine."
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


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


def torch_trainer(job: HostJob, nodes: int, each: Mapping[str, int]) -> Any:
    """``each``: what Ray is to reserve for a host."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback
    from ray.train.backend import BackendConfig
    from ray.train.torch import TorchTrainer

    class NoProcessGroup(BackendConfig):
        """Workers do not import torch, and make no group: ranks are not theirs."""

        backend = "none"

    class Losses(UserCallback):
        """Workers that were lost: told among what the job prints, and not for ever."""

        reached, fruitless = 0, 0

        def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:
            for number, error in worker_exceptions.items():
                job.say(f"  again  worker {number} was lost: {line(error)}; Ray starts all of them again")
            steps = max((event["step"] + 1 for event in Run(job.run).events(0, "step")), default=0)
            self.fruitless = 0 if steps > self.reached else self.fruitless + 1
            self.reached = max(self.reached, steps)
            if self.fruitless >= FRUITLESS:
                raise RuntimeError(f"workers were lost {FRUITLESS} times in a row before step {self.reached + 1}")

    class Trainer(TorchTrainer):
        """One whose failures are told as ``phalanx train`` tells them."""

        def fit(self) -> Any:
            result = super().fit()
            if result.return_value == 0:
                return result
            code, _ = job.asked_to_stop() or (result.return_value, "")
            kind: type[BaseException] = {**REFUSALS, 130: KeyboardInterrupt}.get(code, RuntimeError)
            raise kind(job.why())

    run = Path(job.run)
    scaling = ScalingConfig(
        num_workers=nodes, use_gpu="GPU" in each, resources_per_worker=dict(each), placement_strategy="SPREAD"
    )
    lasting = RunConfig(
        name=run.name, storage_path=str(run.parent), failure_config=FailureConfig(max_failures=-1),
        callbacks=[Losses()],
    )  # fmt: skip
    return Trainer(
        work, train_loop_config=asdict(job), torch_config=NoProcessGroup(), scaling_config=scaling, run_config=lasting
    )


class Fit(threading.Thread):
    """TorchTrainer's ``fit``, aside: on the main thread Ctrl-C would be Ray's, which ends workers without a word."""

    def __init__(self, job: HostJob, nodes: int, each: Mapping[str, int]) -> None:
        super().__init__(name="ray", daemon=True)
        self.job, self.nodes, self.each = job, nodes, each
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            torch_trainer(self.job, self.nodes, self.each).fit()
        except BaseException as error:
            self.error = error

    def ended(self) -> tuple[int, str]:
        """The exit code, and why it is that."""
        if self.error is None:
            return 0, "done"
        asked = self.job.asked_to_stop()
        if asked is None:
            return 1, f"Ray gave it up: {line(self.error)}"
        code, _ = asked
        return code, "it was asked to" if code == 130 else f"exit code {code}"


def line(error: BaseException) -> str:
    """An error of Ray's in one line; what its controller raised is told as that."""
    error = getattr(error, "controller_failure", error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return redact((lines[0] if lines else type(error).__name__).rstrip("."))[:300]
