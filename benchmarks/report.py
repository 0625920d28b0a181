"""What every benchmark prints: a table for people, then a JSON line a figure, and an exit code."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch


@dataclass
class Figure:
    """One measured number, its bar where it has one, and how it was come by."""

    name: str
    value: float
    bar: float | None = None
    note: str = ""

    @property
    def holds(self) -> bool:
        return self.bar is None or self.value <= self.bar


def machine() -> str:
    """Commit, torch and machine: what a figure belongs to."""
    here = Path(__file__).parent
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True
    ).stdout.strip()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    return f"commit {commit or 'unknown'}, torch {torch.__version__}, {device}"


def report(figures: list[Figure]) -> None:
    """Print the figures and leave with 1 if a bar does not hold."""
    width = max(len(figure.name) for figure in figures)
    print(f"\n{machine()}\n")
    print(f"{'figure':<{width}}  {'value':>9}  {'bar':>6}  {'':<5} note")
    for figure in figures:
        bar = "" if figure.bar is None else f"{figure.bar:.3g}"
        verdict = "" if figure.bar is None else "holds" if figure.holds else "FAILS"
        print(f"{figure.name:<{width}}  {figure.value:>9.4g}  {bar:>6}  {verdict:<5} {figure.note}")
    print()
    for figure in figures:
        print(json.dumps(asdict(figure) | {"holds": figure.holds}))
    sys.exit(int(not all(figure.holds for figure in figures)))
