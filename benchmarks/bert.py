"""A masked language model in bf16 beside itself in fp32: time of a step and memory, in turns.

    python benchmarks/bert.py [--steps N] [--rounds N] [--quick]

The `bert` recipe at the shape of BERT large (24 layers of 1,024, 512 tokens a sample, 32 samples) on one GPU, compiled.
Each in a process of its own, one after the other in each round; the ratio is of medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch

import phalanx
from phalanx.recipes.bert import Bert
from report import Figure, report

PRECISIONS = ("bf16", "fp32")
LARGE = {"width": 1024, "layers": 24, "heads": 16, "length": 512, "global_batch": 32, "vocabulary": 30_000}
SMALL = {"width": 128, "layers": 2, "heads": 4, "length": 64, "global_batch": 4}
MOST = 0.5


def measure(precision: str, quick: bool, steps: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = SMALL if quick else LARGE
    task = Bert(**shape, megabytes=4.0, steps=10_000, precision=precision)
    layout = "dp=1,compile=blocks" if device == "cuda" else "dp=1"
    with phalanx.Engine(task, layout, device=device) as engine:
        batches, waits = engine.batches(), torch.cuda.synchronize if device == "cuda" else lambda: None
        for _ in range(4):
            engine.step(next(batches))
        waits()
        began = time.perf_counter()
        for _ in range(steps):
            engine.step(next(batches))
        waits()
        seconds = (time.perf_counter() - began) / steps
    gib = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    print(json.dumps({"ms": 1e3 * seconds, "tokens": shape["length"] * shape["global_batch"] / seconds, "gib": gib}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--one", choices=PRECISIONS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure(options.one, options.quick, options.steps)
        return
    found: dict[str, list[dict[str, float]]] = {precision: [] for precision in PRECISIONS}
    for _ in range(options.rounds):
        for precision, each in found.items():
            command = [sys.executable, __file__, "--one", precision, "--steps", str(options.steps)]
            done = subprocess.run([*command, *["--quick"] * options.quick], capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{precision}:\n{done.stderr[-3000:]}")
            each.append(json.loads(done.stdout.splitlines()[-1]))
    narrow, wide = ({name: statistics.median(one[name] for one in each) for name in each[0]} for each in found.values())
    note = f"{narrow['tokens']:,.0f} tokens/s ({narrow['ms']:.1f} ms) to {wide['tokens']:,.0f} ({wide['ms']:.1f} ms)"
    bar = None if options.quick or not torch.cuda.is_available() else MOST
    note += f", {narrow['gib']:.1f} GiB to {wide['gib']:.1f}"
    report([Figure("bert, time in bf16 to that in fp32", narrow["ms"] / wide["ms"], bar, note)])


if __name__ == "__main__":
    main()
