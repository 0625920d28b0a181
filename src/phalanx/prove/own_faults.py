"""Errors of the prover itself: told as a bug in phalanx prove, with what to report, and never blamed on the task."""

from __future__ import annotations

import platform
import sysconfig
from pathlib import Path

import torch

from phalanx import __version__

OURS = "this is a bug in phalanx prove, not in your task"
REPORT = "Please report it with the lines above."
HERE = Path(__file__).resolve().parent
PLANTED = HERE / "bugs"
LAST = 6
"""So many lines of a traceback are told."""


def is_own(trace: str) -> bool:
    """Whether the last error of a printed traceback was raised by a line of the prover itself.

    What the task, its model, torch or the engine raise while a proof runs them is not.
    """
    places = [line.split('"')[1] for line in trace.splitlines() if line.strip().startswith('File "')]
    python = sysconfig.get_path("stdlib")
    beyond = [path for path in places if not path.startswith(python) or "site-packages" in path]
    innermost = Path(beyond[-1]).resolve() if beyond else Path()
    return innermost.is_relative_to(HERE) and not innermost.is_relative_to(PLANTED)


def described(doing: str, trace: str) -> tuple[str, list[str], str]:
    """What to say of such an error: a summary, the last lines of its traceback, and what to do."""
    lines = trace.strip().splitlines()
    versions = f"phalanx {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    summary = f"{OURS}: {doing} failed with {lines[-1].strip()}"
    return summary, ["\n".join([*lines[-LAST:], versions])], REPORT


def in_words(doing: str, trace: str) -> str:
    """The same as one text."""
    summary, lines, advice = described(doing, trace)
    return "\n".join([summary, *lines, advice])
