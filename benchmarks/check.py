"""The check of a task before its first step: how long it takes by itself, and what it adds to a run's start."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from phalanx.parallel.torch_private import preload
from phalanx.references import find_task
from phalanx.train.check.beside import checked
from report import Figure, report

BAR_SECONDS = 2.0
TASKS = ("gpt", "shapes", "examples/spirals.py")


def figures(quick: bool) -> Iterator[Figure]:
    preload()  # as a rank that starts has done already
    for name in TASKS:
        seconds = []
        for _ in range(1 if quick else 5):
            began = time.perf_counter()
            found = checked(find_task(name)())
            seconds.append(time.perf_counter() - began)
            assert (found.refusal, found.warnings, found.left_out) == ("", [], ""), found
        yield Figure(f"check of {name} by itself, seconds", statistics.median(seconds), BAR_SECONDS)
    for name in TASKS:
        pairs = [(_run(name), _run(name, "--unchecked")) for _ in range(1 if quick else 5)]
        with_it, without = (statistics.median(side) for side in zip(*pairs, strict=True))
        note = f"{with_it:.1f} s to {without:.1f} s"
        yield Figure(f"{name}, 2 steps on 2 ranks: seconds added", with_it - without, BAR_SECONDS, note)


def _run(name: str, *words: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "phalanx", "train", name, "--on", "local:2", "--device", "cpu"]
        began = time.perf_counter()
        subprocess.run([*command, "--steps", "2", "--run", f"{folder}/run", *words], check=True, capture_output=True)
        return time.perf_counter() - began


if __name__ == "__main__":
    report(list(figures("--quick" in sys.argv)))
