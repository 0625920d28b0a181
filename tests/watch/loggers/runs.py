"""A run that every logger's test looks at: it loses its first rank, goes back a few steps, and is resumed later."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.run import Run
from tests.test_cli import phalanx

TASK = """
from dataclasses import dataclass
import phalanx
from tests.tasks import Digits
{more}

@dataclass
class Mine(Digits):
    evaluate_every: int = 5
    api_key: str = "topsecret"

    def loss(self, output, batch):
        phalanx.log("accuracy", (output.argmax(1) == batch["y"]).float().mean())
        if phalanx.rows(output)[0] == 0 and output.requires_grad:
            phalanx.log("some/first x", batch["x"][0, 0], count=1)
        one = phalanx.losses.cross_entropy(output, batch["y"])
        return phalanx.losses.sum(right=one, small=0.1 * phalanx.losses.cross_entropy(output, batch["y"]))
{methods}
"""
STEPS = 13


Command = Callable[..., Any]


def patiently(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command in a fresh process, for packages that take long to import and to begin."""
    command = [sys.executable, "-m", "phalanx", *words]
    path = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, env=environment)


def trained(folder: Path, *names: str, more: str = "", phalanx: Command = phalanx) -> Run:
    """Killed after step 8 and back at 6; resumed after step 10 with another number of ranks."""
    (folder / "task.py").write_text(TASK.format(more=more, methods=""))
    logs = [word for name in names for word in ("--log", name)]
    words = ["task.py", "--on", "local:2", "--steps", "10", "--kill", "0@8", "--memory-steps", "3", *logs]
    done = phalanx("train", *words, "--run", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "again" in done.stderr, "it did not lose a rank"
    done = phalanx(
        "train",
        "--resume",
        "--run",
        "run",
        "--steps",
        str(STEPS),
        "--on",
        "local:1",
        "--set",
        "api_key=topsecret",
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return Run(folder / "run")


def losses(run: Run) -> list[float]:
    """By the run's own events."""
    return [float(event["loss"]) for event in run.ledger().values()]
