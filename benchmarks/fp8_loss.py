"""What 8 bits cost in loss: of real text, in bf16 and in fp8, the same weights and samples from several seeds.

    python benchmarks/fp8_loss.py [--steps 300] [--seeds 2] [--quick]

The recipe ``gpt`` with 8 blocks of 768 features, 32 sequences of 512 bytes, on one GPU, compiled. The training loss is
the mean of the last fifteenth of the steps. Each seed is held to the bar by itself.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

import phalanx
from phalanx.recipes.gpt import GPT
from phalanx.task import Precision
from report import Figure, report

SHAPE: dict[str, Any] = {
    "width": 768, "layers": 8, "heads": 12, "kv_heads": 12, "length": 512, "global_batch": 32, "megabytes": 16.0,
    "learning_rate": 3e-4,
}  # fmt: skip
BAR = 0.005


def losses(precision: Precision, seed: int, steps: int) -> tuple[float, float]:
    """In training, and of held-out text."""
    task = GPT(**SHAPE, steps=steps, seed=seed, precision=precision)
    with phalanx.Engine(task, "dp=1,compile=blocks", device="cuda") as engine:
        seen = [engine.step(batch).loss for batch in engine.batches()]
        found = statistics.mean(seen[-max(1, steps // 15) :]), engine.evaluate()["loss"]
    print(f"{precision:<5} seed {seed}  training {found[0]:.4f}, held out {found[1]:.4f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one seed, 40 steps")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("not run: there is no GPU here")
    steps, seeds = (40, 1) if options.quick else (options.steps, options.seeds)
    bar, figures = None if options.quick else BAR, []
    for seed in range(seeds):
        wide, narrow = (losses(precision, seed, steps) for precision in ("bf16", "fp8"))
        for kind, theirs, ours in zip(("training", "held-out"), wide, narrow, strict=True):
            name = f"seed {seed}: {kind} loss above bf16's after {steps} steps"
            figures.append(Figure(name, ours / theirs - 1, bar, f"{ours:.4f} to {theirs:.4f}"))
    report(figures)


if __name__ == "__main__":
    main()
