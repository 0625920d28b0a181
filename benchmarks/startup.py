"""Start-up: 8 ranks from nothing to the end of their first step, Phalanx's local launch against torchrun."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from report import Figure

RANKS = 8
BAR = 0.4
SETTINGS = ["width=32", "layers=2", "heads=2", "kv_heads=1", "length=32", "megabytes=0.3", "global_batch=8", "steps=1"]

PROGRAM = f"""
import dataclasses
import phalanx
from phalanx.recipes.gpt import GPT

class Task(GPT):
    def held_out(self):
        return None

values = dict(text.split("=") for text in {SETTINGS!r})
task = Task(**{{name: float(v) if "." in v else int(v) for name, v in values.items()}})
engine = phalanx.Engine(task, "dp={RANKS}", device="cpu")
for batch in engine.batches():
    engine.step(batch)
engine.close()
"""

TASK = """
from phalanx.recipes.gpt import GPT

class Task(GPT):
    def held_out(self):
        return None
"""


def figures(quick: bool) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "program.py").write_text(PROGRAM)
        (folder / "task.py").write_text(TASK)
        sets = [word for setting in SETTINGS for word in ("--set", setting)]
        ours = [
            sys.executable,
            "-m",
            "phalanx",
            "train",
            "task.py",
            "--on",
            f"local:{RANKS}",
            "--device",
            "cpu",
            *sets,
        ]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        theirs = [*torchrun, "program.py"]
        pairs = [(_seconds(ours, folder), _seconds(theirs, folder)) for _ in range(1 if quick else 5)]
    ratio = statistics.median(a / b for a, b in pairs)
    mine, other = (statistics.median(side) for side in zip(*pairs, strict=True))
    yield Figure(
        f"start-up, {RANKS} ranks to the end of a step, to torchrun", ratio, BAR, f"{mine:.1f} s to {other:.1f} s"
    )


def _seconds(command: list[str], folder: Path) -> float:
    started = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return time.perf_counter() - started
