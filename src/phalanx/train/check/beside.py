"""The check run beside a rank that starts: in a process forked from it before it computes or opens its data.

They share nothing: what the check computes, draws, reads or changes in the user's objects is gone with it. A build of
torch with CUDA refuses autograd in a child of a process that has run it, or uses a GPU; there nothing is checked, and
that is said.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Self

import torch

from phalanx import streams
from phalanx.errors import CannotHere, WrongUse
from phalanx.processes import die_with_parent
from phalanx.task import Task
from phalanx.torch_errors import About, is_about
from phalanx.train.check.checking import look
from phalanx.train.check.subject import CannotCheck, Fails, RefusedAnyway
from phalanx.train.model_flops import ModelFlops, model_flops

if TYPE_CHECKING:
    from phalanx.train.engine import Engine

LONGEST_REASON = 240
"""Characters of why a task was not checked: torch lists all of its backends in some errors."""
PATIENCE_SECONDS = 60.0
"""How long a rank that is ready waits for it,"""
LOOK_SECONDS = 0.1
"""and how often it looks whether it is still there."""
WAY_OUT = "If it is meant so: --unchecked."


class TaskRefused(WrongUse):
    """The check has refused the task."""


@dataclass
class Checked:
    """What came of a check."""

    refusal: str = ""
    """What is certainly wrong."""
    anyway: bool = False
    """Training would refuse it, too."""
    warnings: list[str] = field(default_factory=list)
    left_out: str = ""
    """Why it was not done, or not to its end."""

    def or_refuse(self) -> Self:
        """Itself, unless something is certainly wrong."""
        if self.refusal:
            raise TaskRefused(self.refusal if self.anyway else f"{self.refusal} {WAY_OUT}")
        return self

    def told(self) -> list[str]:
        """What is not wrong for certain, a line each."""
        left_out = [f"   note  the task was not checked: {self.left_out}"] if self.left_out else []
        return [*(f"warning  {warning}" for warning in self.warnings), *left_out]


class Check:
    """A check that has begun. What it has to say goes before what goes wrong meanwhile."""

    def __init__(self, task: Task, pretrained: bool = False, unchecked: bool = False) -> None:
        """``pretrained``: the weights will be others than the model's own. ``unchecked``: it is not wanted."""
        self._pipe: Connection | None = None
        self._found: Checked | None = None
        self._flops: ModelFlops | None = None
        self._killed = False
        if unchecked:
            self._found = Checked(left_out="--unchecked")
        elif torch.cuda.is_initialized():
            self._found = Checked(left_out="this process uses a GPU already")
        else:
            self._start(task, pretrained)

    def _start(self, task: Task, pretrained: bool) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(task, pretrained, theirs), name="check")
        self._process.start()
        assert self._process.pid is not None
        _lead(self._process.pid)
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if isinstance(error, Exception) and not isinstance(error, TaskRefused):
                self.result().or_refuse()
        finally:
            self.close()

    def result(self) -> Checked:
        """What came of it; waits for that."""
        if self._found is None:
            self._found = self._received()
            if self._found.refusal:
                self.close()
        return self._found

    def flops(self) -> ModelFlops | None:
        """What training costs, which is counted after the check; None: not yet. Nothing is waited for."""
        if self._flops is None and self._pipe is None:
            self._flops = ModelFlops(why=f"the task was not checked: {self.result().left_out}")
        elif self._flops is None and self._pipe is not None and self._pipe.poll():
            try:
                self._flops = pickle.loads(self._pipe.recv_bytes())
            except (EOFError, OSError):
                self._flops = ModelFlops(why="the process that counts its FLOPs has ended")
            self.close()
        return self._flops

    def _received(self) -> Checked:
        assert self._pipe is not None
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._pipe.poll(LOOK_SECONDS):
            if self._ended():  # and what it has started holds the pipe open
                break
            if time.monotonic() > deadline:
                self.close()
                return Checked(left_out=f"it took more than {PATIENCE_SECONDS:g} s")
        try:
            if self._pipe.poll():
                return pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):  # it ends, before it or while it sent
            while not self._ended() and time.monotonic() < deadline:
                time.sleep(LOOK_SECONDS)
        code = self._kill()
        self.close()
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"
        return Checked(left_out=f"its process {how}")

    def _ended(self) -> bool:
        """Whether its process has; its number stays taken until it is joined."""
        assert self._process.pid is not None
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # joined meanwhile, by whoever looked after all children
            return True

    def _kill(self) -> int | None:
        """With what the user's code has started in it; returns its exit code."""
        assert self._process.pid is not None
        if not self._killed:  # else its number may be another's by now
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.join()
            self._killed = True
        return self._process.exitcode

    def close(self) -> None:
        """End it, wherever it is."""
        if self._pipe is not None:
            self._kill()
            self._process.close()
            self._pipe.close()
            self._pipe = None


def settle(engine: Engine, check: Check | None, note: Callable[..., None], say: Callable[[str], None]) -> None:
    """Before the first step, on every rank: refuse what the check refuses; whoever has it says and notes the rest."""
    found = check.result() if check is not None else Checked()
    refused = [found.refusal, *(["anyway"] if found.anyway else [])] if found.refusal else []
    refusal, *anyway = engine.mesh.world.broadcast_words(refused, 0) or [""]
    Checked(refusal, bool(anyway)).or_refuse()
    if check is not None:
        note("check", warnings=found.warnings, left_out=found.left_out)
        for line in found.told():
            say(line)


def _lead(pid: int) -> None:
    """A process with a group of its own, so that it can be ended with what it starts."""
    with suppress(OSError):
        os.setpgid(pid, 0)


def _run(task: Task, pretrained: bool, pipe: Connection) -> None:
    die_with_parent()
    _lead(0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    streams.led_elsewhere(*(os.open(os.devnull, os.O_WRONLY) for _ in range(2)))  # the ranks print it as well
    pipe.send_bytes(pickle.dumps(checked(task, pretrained)))
    streams.silenced()  # what its data and its model say was said in the check
    pipe.send_bytes(pickle.dumps(model_flops(task)))
    pipe.close()
    os._exit(0)


def checked(task: Task, pretrained: bool = False) -> Checked:
    """The check's result as words."""
    found = Checked()
    try:
        look(task, pretrained, found.warnings)
    except WrongUse as refusal:
        found.refusal, found.anyway = str(refusal), isinstance(refusal, RefusedAnyway)
    except (Fails, CannotCheck, CannotHere) as reason:
        found.left_out = _reason(reason, str(reason))
    except Exception as error:
        found.left_out = _reason(error, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    return found


def _reason(error: Exception, told: str) -> str:
    """One line, however much an error says."""
    if is_about(error, About.FORK):
        return "this process has computed before it"
    line = (told.splitlines() or [""])[0]
    return line if len(line) <= LONGEST_REASON else f"{line[:LONGEST_REASON].rpartition(' ')[0]} ..."
