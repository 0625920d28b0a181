"""On a worker of Ray's: the supervisor of a host as a child process that ends with it, and its steps told to Ray.

A child, since ranks are forked from their supervisor, and a worker of Ray's has threads. The worker itself does not
import torch.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.files import write_whole
from phalanx.folder_files import appending, read_text, reading
from phalanx.processes import die_with_parent
from phalanx.run import LAST_BYTES, Run

LOOK_SECONDS = 0.1
AGREE_SECONDS = 60.0
"""For all workers to have told Ray the end, when their ranks have ended."""
LAUNCHED = (
    "TORCHELASTIC_RUN_ID", "RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "JSM_NAMESPACE_RANK",
    "SLURM_STEP_ID", "PET_NNODES", "SM_HOSTS", "SKYPILOT_NODE_IPS", "CLUSTER_SPEC",
)  # fmt: skip
"""Variables by which a process knows its launcher: what started Ray's nodes has not started these ranks."""


@dataclass(frozen=True)
class HostJob:
    """What a worker has to know; plain, since it travels."""

    words: tuple[str, ...]
    """After ``phalanx``."""
    folder: str
    """Where they are run."""
    run: str
    files: str
    """A folder for what workers print, and for the request to stop."""

    @property
    def stop_path(self) -> Path:
        return Path(self.files) / "stop"

    def output(self, worker: int | str) -> Path:
        """What a worker printed, or what is said of all of them."""
        return Path(self.files) / f"worker-{worker}.out"

    def say(self, line: str) -> None:
        """Among what the job prints."""
        with appending(Path(self.run), self.output("all")) as output:
            output.write(f"{line}\n".encode(errors="replace"))

    def ask_to_stop(self, code: int, worker: int | str = "all") -> None:
        """Of all workers; the first who asks says with which exit code, and whose output tells why."""
        if not self.stop_path.exists():
            write_whole(self.stop_path, f"{code} {worker}\n", within=Path(self.run))

    def asked_to_stop(self) -> tuple[int, str] | None:
        """With which exit code, and by whom."""
        with suppress(OSError, ValueError):
            code, worker = read_text(Path(self.run), self.stop_path, 100).split()
            return int(code), worker
        return None

    def why(self) -> str:
        """The last that the one who asked to stop has printed."""
        path = self.output((self.asked_to_stop() or (1, "all"))[1])
        with suppress(OSError), reading(Path(self.run), path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
            return "\n".join(file.read(LAST_BYTES).decode(errors="replace").rstrip().split("\n")[-3:])
        return f"nothing was printed to {path}. See Ray's own logs of the workers."


class HostLost(RuntimeError):
    """A supervisor was ended from outside: Ray is to start again."""


class HostChild:
    """``phalanx train`` on this host, as a child of this thread: it ends when that ends."""

    def __init__(self, job: HostJob, more: tuple[str, ...] = (), worker: int = 0) -> None:
        self.job = job
        variables = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
        command = [sys.executable, "-m", "phalanx.launch.ray_worker", str(os.getpid()), *job.words, *more]
        try:
            with appending(Path(job.run), job.output(worker)) as output:
                self.process = subprocess.Popen(
                    command, cwd=job.folder, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output
                )
        except OSError as error:
            raise HostLost(
                f"node {socket.gethostname()} cannot begin: {error.filename}: {error.strerror}. Keep the folder that "
                "the command was started in, and that of the run, on storage that all nodes share."
            ) from None

    def wait(self) -> int:
        """Its exit code. It is asked to save and end when somebody wants the job to."""
        asked = False
        try:
            while (code := self.process.poll()) is None:
                if not asked and self.job.stop_path.exists():
                    asked = True
                    self.process.send_signal(signal.SIGTERM)
                time.sleep(LOOK_SECONDS)
        finally:
            self.end()
        if code < 0:
            name = signal.Signals(-code).name
            raise HostLost(f"the supervisor on {socket.gethostname()} was ended by {name}; the run goes on when it can")
        return code

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class StepNews:
    """Rank 0's steps and evaluations, as metrics: those that were not told yet."""

    def __init__(self, run: Run) -> None:
        self.run, self.at, self.rest = run, 0, b""
        self.metrics: dict[str, Any] = {}
        with suppress(OSError):  # of an earlier start
            self.at = run.events_path(0).stat().st_size

    def look(self) -> dict[str, Any] | None:
        """The newest, if there is anything new."""
        try:
            with reading(self.run.path, self.run.events_path(0)) as file:
                file.seek(self.at)
                added = file.read()
        except OSError:
            return None
        self.at += len(added)
        *whole, self.rest = (self.rest + added).split(b"\n")
        before = dict(self.metrics)
        for line in whole:
            with suppress(ValueError):
                self._take(json.loads(line))
        return dict(self.metrics) if self.metrics != before else None

    def _take(self, event: Mapping[str, Any]) -> None:
        if event.get("kind") == "step":
            self.metrics |= {"step": event["step"] + 1, "loss": event["loss"]}
        elif event.get("kind") == "evaluation":
            self.metrics |= {"held_out": event["held_out"]}


def told(run: Run, over: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """Metrics as they come, until it is over."""
    news = StepNews(run)
    while True:
        last = over()
        if (metrics := news.look()) is not None:
            yield metrics
        if last:
            return
        time.sleep(LOOK_SECONDS)


def work(given: Mapping[str, Any]) -> int:
    """What each of TorchTrainer's workers runs; gives the exit code."""
    import ray.train
    from ray.train.collective import broadcast_from_rank_zero

    job = HostJob(**given)
    context = ray.train.get_context()
    worker, workers = context.get_world_rank(), context.get_world_size()
    if workers > 1:
        meet = broadcast_from_rank_zero(_free_address() if worker == 0 else None)
        names = ("--max-nodes", str(workers), "--min-nodes", str(workers), "--meet", meet, "--host", f"worker-{worker}")
    if (asked := job.asked_to_stop()) is not None:
        return asked[0]
    child = HostChild(job, names if workers > 1 else (), worker)
    telling = threading.Thread(target=_tell, args=(job, child, worker == 0), daemon=True)
    telling.start()
    code = child.wait()
    if code:
        job.ask_to_stop(code, worker)  # no host goes on without this one
    telling.join(AGREE_SECONDS)
    return code


def _tell(job: HostJob, child: HostChild, first: bool) -> None:
    """Report what rank 0 does. Ray has every worker report as often as the others: the first says what and when."""
    from ray.train import Checkpoint, report
    from ray.train.collective import broadcast_from_rank_zero
    from ray.train.v2.api.report_config import CheckpointUploadMode

    run = Run(job.run)
    stream = told(run, lambda: child.process.poll() is not None) if first else iter(())
    metrics: dict[str, Any] | None = {}
    last: dict[str, Any] = {}
    while metrics is not None:
        metrics = broadcast_from_rank_zero(next(stream, None) if first else None)
        last = metrics or last
        if metrics is not None:
            report(metrics)
    done = broadcast_from_rank_zero(child.process.wait() == 0 and run.certified_steps() is not None if first else None)
    if done:
        final = Checkpoint.from_directory(run.weights_path.parent) if first else None
        report(last, checkpoint=final, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)


def _free_address() -> str:
    """On this node, for supervisors to meet."""
    import ray.util

    address = ray.util.get_node_ip_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        port = server.getsockname()[1]
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def trial(config: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """One trial of Ray Tune's: the task with these settings, trained on this worker."""
    from ray import tune

    run = Run.folder(Path(tune.get_context().get_trial_dir()) / "run", "run")
    settings = tuple(word for name, value in config.items() for word in ("--set", f"{name}={value}"))
    words = (*given["words"], *settings, "--run", str(run.path), "--resume")
    job = HostJob(words, given["folder"], str(run.path), str(run.path))
    child = HostChild(job)
    try:
        for metrics in told(run, lambda: child.process.poll() is not None):
            tune.report(metrics)
    finally:
        child.end()
    if code := child.wait():
        job.ask_to_stop(code, 0)
        raise RuntimeError(job.why())


def main() -> None:
    """The child: ``phalanx`` with the words after the number of the process that started it."""
    die_with_parent()
    if os.getppid() != int(sys.argv[1]):
        raise SystemExit(1)
    sys.argv = ["phalanx", *sys.argv[2:]]
    runpy.run_module("phalanx", run_name="__main__")


if __name__ == "__main__":
    main()
