"""An evaluation beside training: a process that follows a run's checkpoints, so that no step waits for it.

Whatever becomes of it, the run goes on: what went wrong is told, and that is all.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field

from phalanx.errors import WrongUse
from phalanx.events import say
from phalanx.run import Run
from phalanx.verdict import Verdict

LAST_SECONDS = 600.0
"""How long the last evaluation may take after the run has ended."""
DEVICE = re.compile(r"cpu|cuda(:\d+)?")


def check(device: str) -> None:
    """Refuse what is no device."""
    if not DEVICE.fullmatch(device):
        raise WrongUse(f"--evaluate-on {device} is no device. Give cpu, cuda, or one of several, as cuda:1.")


@dataclass
class EvaluatedBeside:
    """The process, if one is asked for."""

    device: str | None
    run: Run
    quiet: bool = False
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        """From now on; the run's settings are in its folder."""
        if self.device is None:
            return
        kind, _, number = self.device.partition(":")
        words = ["evaluate", str(self.run.path), "--follow", "--layout", "dp=1", "--device", kind]
        variables = dict(os.environ)
        if number:
            visible = variables.get("CUDA_VISIBLE_DEVICES", "").split(",")
            chosen = visible[int(number)] if int(number) < len(visible) and visible[0] else number
            variables["CUDA_VISIBLE_DEVICES"] = chosen
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "phalanx", *words], env=variables, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if self.quiet else None, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            say(f"   note  the evaluation beside training cannot be started: {error.strerror or error}")

    def finish(self, verdict: Verdict) -> None:
        """The run has ended, and nobody holds it any more: after a good end the last checkpoint is still evaluated."""
        if self.process is None:
            return
        if not verdict.holds:
            self.end()
            return
        try:
            code = self.process.wait(LAST_SECONDS)
        except subprocess.TimeoutExpired:
            self.end()
            say(f"   note  the last evaluation beside training took more than {LAST_SECONDS:g} s, and was ended")
            return
        if code:
            ended = f"signal {-code}" if code < 0 else f"exit code {code}"
            say(f"   note  the evaluation beside training ended with {ended}; the run is not touched by it")

    def end(self) -> None:
        """At once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
