"""``phalanx.train(task, layout, on)``: a whole run, from a notebook's cell or a script, with the result in hand.

The run has a supervisor in a process of its own, forked by a server (``launch.forkserver``), for this process may have
computed. What it prints appears here; an interrupt has its ranks save and end.
"""

from __future__ import annotations

import codecs
import copy
import os
import pickle
import signal
import sys
import termios
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from phalanx import references
from phalanx.errors import REFUSALS, CannotHere, WrongUse
from phalanx.launch import forkserver
from phalanx.launch.forkserver import Forked, ForkServer, without_copying
from phalanx.layout import Layout
from phalanx.run import Run
from phalanx.streams import RedactedStream
from phalanx.task import Task
from phalanx.train import running
from phalanx.train.job import Job
from phalanx.train.options import Options
from phalanx.train.resolving import job_of, plan_steps
from phalanx.verdict import Verdict

LAST_SECONDS = 10.0
"""How long a supervisor that has said what came of it may take to end."""
COLUMNS = 110
"""Of a notebook's cell."""


@dataclass(frozen=True)
class Trained:
    """What came of a run."""

    verdict: Verdict
    run: Run

    def __str__(self) -> str:
        return str(self.verdict)

    __repr__ = __str__

    @property
    def losses(self) -> list[float]:
        """Of each step that counts."""
        return [float(event["loss"]) for event in self.run.ledger().values() if event["kind"] == "step"]

    def weights(self) -> dict[str, torch.Tensor]:
        """The final weights, under the model's own names."""
        if not self.run.weights_path.exists():
            raise WrongUse(f"the run is not finished: {self.verdict.summary}. Go on with resume=True.")
        return load_file(self.run.weights_path)


class RunFailed(RuntimeError):
    """A run did not come to its end; ``trained`` is what came of it."""

    def __init__(self, trained: Trained) -> None:
        super().__init__(str(trained))
        self.trained = trained


def train(
    task: Task,
    layout: Layout | str | None = None,
    on: str | None = None,
    *,
    run: str | Path | None = None,
    resume: bool = False,
    device: str | None = None,
    exact: bool = False,
    **options: Any,
) -> Trained:
    """Train a task on ranks of this machine, ``on="local:4"``, and wait for it.

    ``options``: those of ``phalanx train``, such as ``save_steps=100``. A run that fails raises `RunFailed`. Ctrl-C, or
    a notebook's stop, has ranks save what they have done, and raises KeyboardInterrupt then; ``resume=True`` with the
    same ``run`` goes on.
    """
    if references.importing:
        raise WrongUse(
            f"{references.importing[-1]} calls phalanx.train while it is imported for its task. Put that under "
            'if __name__ == "__main__":, so that it can be imported.'
        )
    job = _job(task, layout, on, device, exact, options)
    if resume and run is None:
        raise WrongUse("resume=True does not say which run goes on. Give its folder: run=...")
    path = None if run is None else Path(run)
    server = forkserver.kept() or ForkServer(without_copying(task))
    try:
        watched = _Watched(server, job, path, resume)
        answer = watched.until_end()
    finally:
        if server is not forkserver.kept():
            server.close()
    if isinstance(answer, Exception):
        if watched.interrupted:
            raise KeyboardInterrupt from answer
        raise answer
    verdict, folder = answer
    trained = Trained(_to_go_on_here(verdict, folder), Run(folder))
    if trained.verdict.holds or watched.interrupted:
        print(trained, file=sys.stdout if trained.verdict.holds else sys.stderr, flush=True)
    if watched.interrupted:
        raise KeyboardInterrupt
    if trained.verdict.holds:
        return trained
    refusal = REFUSALS.get(trained.verdict.exit_code)
    raise RunFailed(trained) if refusal is None else refusal(str(trained))


def _to_go_on_here(verdict: Verdict, folder: Path) -> Verdict:
    """With Python's way to go on in place of the command line's, which knows no class of a notebook's."""
    shell, here = f"phalanx train --resume --run {folder}", f"phalanx.train(..., run={str(folder)!r}, resume=True)"
    return replace(verdict, next=verdict.next.replace(shell, here))


def _job(
    task: Task, layout: Layout | str | None, on: str | None, device: str | None, exact: bool, options: Mapping[str, Any]
) -> Job:
    if not isinstance(task, Task):
        raise WrongUse(f"{task!r} is no task. Give an instance of a phalanx.Task, e.g. MyTask().")
    task.check()
    unknown = [name for name in options if name not in asdict(Options())]
    if unknown:
        raise WrongUse(f"{unknown[0]} is no option of phalanx.train. Choose one of: {', '.join(asdict(Options()))}.")
    planned = copy.copy(task)  # the caller's own keeps its steps, and may be given other epochs
    plan_steps(planned)
    return job_of(
        _reference(task), planned, None if layout is None else str(layout), on, device, Options(**options), exact=exact
    )


def _reference(task: Task) -> str:
    """By which the command line finds the task too; in a notebook, its name."""
    kind = type(task)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return f"{Path(file).resolve()}:{kind.__qualname__}" if file and file.endswith(".py") else kind.__qualname__


class _Watched:
    """A supervisor's process: what it prints is printed here, and what it came to is had from it."""

    def __init__(self, server: ForkServer, job: Job, path: Path | None, resume: bool) -> None:
        self.screen, theirs = _terminal() if _renews() else os.pipe()
        ours, answers = os.pipe()
        self.answers = Connection(ours, writable=False)
        self.interrupted = False
        try:
            self.process: Forked = server.fork(_supervise, job, path, resume, descriptors=(theirs, answers))
        finally:
            os.close(theirs)
            os.close(answers)

    def until_end(self) -> Any:
        """The verdict and the run's folder, or what was raised."""
        while True:
            try:
                self._show()
                break
            except KeyboardInterrupt:
                if self.interrupted:
                    self.process.kill()
                    break
                self.interrupted = True
                with suppress(ProcessLookupError):
                    os.kill(self.process.pid, signal.SIGTERM)
        os.close(self.screen)
        with self.answers:
            try:
                answer = pickle.loads(self.answers.recv_bytes())
                self.process.join(LAST_SECONDS)  # it has said all, and ends: nothing is left running
                return answer
            except (EOFError, OSError):
                self.process.join()
                return CannotHere(
                    f"the process that runs the ranks ended with exit code {self.process.exitcode} before it said what "
                    "came of them. See what it printed; go on with resume=True."
                )

    def _show(self) -> None:
        decoded = codecs.getincrementaldecoder("utf-8")("replace")
        while True:
            try:
                text = os.read(self.screen, 1 << 16)
            except OSError:  # a terminal whose other end is closed
                return
            if not text:
                return
            sys.stdout.write(decoded.decode(text))
            sys.stdout.flush()


def _renews() -> bool:
    """Whether a line that is written over can be seen as such: on a terminal, and in a notebook."""
    return sys.stdout.isatty() or "ipykernel" in sys.modules


def _terminal() -> tuple[int, int]:
    """A terminal's two ends, which leaves what is written as it is."""
    ours, theirs = os.openpty()
    mode = termios.tcgetattr(theirs)
    mode[1] &= ~termios.OPOST
    termios.tcsetattr(theirs, termios.TCSANOW, mode)
    termios.tcsetwinsize(theirs, (24, COLUMNS))
    return ours, theirs


def _supervise(job: Job, path: Path | None, resume: bool, screen: int, answers: int) -> None:
    """In a process of its own: the whole run."""
    for stream in (1, 2):
        os.dup2(screen, stream)
    os.close(screen)
    _before = sys.stdout, sys.stderr  # kept to the end: theirs would close the descriptors
    sys.stdout, sys.stderr = (RedactedStream(os.fdopen(n, "wb"), line_buffering=True) for n in (1, 2))
    os.environ["COLUMNS"] = str(COLUMNS)
    runs: list[Run] = []
    with Connection(answers, readable=False) as pipe:
        try:
            verdict = running.train(job, path, resume, runs.append)
            pipe.send_bytes(pickle.dumps((verdict, runs[0].path)))
        except (WrongUse, CannotHere) as error:
            pipe.send_bytes(pickle.dumps(error))
