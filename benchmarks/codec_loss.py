"""What few bits cost in loss: of held-out text, after training with each codec from several seeds.

    python benchmarks/codec_loss.py [COMM ...] [--steps 2000] [--seeds 3] [--axis dp|fsdp] [--quick]

A small language model on two ranks, the same samples in the same order as without a codec. One run's loss differs
from another's by a percent whatever is sent, so a codec is held against that: the difference of the means over seeds,
in units of how far the seeds of exact training lie apart. `int4`, which owes what it does not say, has a bar: one.
Over ``fsdp`` weights are gathered in few bits, too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

import phalanx
from phalanx.launch.forkserver import ForkServer
from phalanx.launch.pool import Pool
from phalanx.recipes.gpt import GPT
from report import Figure, report

SHAPE: dict[str, Any] = {"width": 128, "layers": 3, "kv_heads": 4, "length": 96, "global_batch": 16}
BARRED = "int4"


def loss(axis: str, comm: str, seed: int, steps: int) -> float:
    """Of held-out text, on each rank alike."""
    torch.set_num_threads(1)
    task = GPT(**SHAPE, steps=steps, seed=seed)
    with phalanx.Engine(task, f"{axis}=2,comm={comm}", device="cpu") as engine:
        for batch in engine.batches():
            engine.step(batch)
        return engine.evaluate()["loss"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comm", nargs="*", default=[BARRED], metavar="COMM", help="methods beside exact")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--axis", choices=["dp", "fsdp"], default="dp")
    parser.add_argument("--quick", action="store_true", help="2 seeds, 60 steps")
    options = parser.parse_args()
    steps, seeds = (60, 2) if options.quick else (options.steps, options.seeds)
    pool = Pool(ForkServer(), 2, timedelta(minutes=5))
    pool.patience = None
    found: dict[str, list[float]] = {}
    for comm in ["exact", *options.comm]:
        for seed in range(seeds):
            answers = pool.ask(2, loss, options.axis, comm, seed, steps)
            if any(answer.failed for answer in answers):
                sys.exit(f"comm={comm}, seed {seed}: {answers[0].trace or answers[1].trace}")
            found.setdefault(comm, []).append(answers[0].value)
            print(f"{comm:<12} seed {seed}  {answers[0].value:.4f}", flush=True)
    pool.close()
    exact = found.pop("exact")
    apart = max(exact) - min(exact)
    figures = [Figure("exact: how far seeds lie apart", apart, note=", ".join(f"{value:.4f}" for value in exact))]
    for comm, losses in found.items():
        more = statistics.mean(losses) - statistics.mean(exact)
        note = f"{', '.join(f'{value:.4f}' for value in losses)}: {more / statistics.mean(exact):+.2%}"
        figures.append(Figure(f"{comm}: more loss, in that unit", more / apart, 1.0 if comm == BARRED else None, note))
    report(figures)


if __name__ == "__main__":
    main()
