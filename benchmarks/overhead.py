"""What Phalanx costs: time per step against loops by hand, start-up against torchrun, memory against arithmetic.

    python benchmarks/overhead.py [--quick]

Both sides run in the same processes, in turns, and the figure is the median of their ratios: the machine may be busy,
but it is busy for both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch.distributed as dist

import memory
import phalanx
import startup
from by_hand import ByHand, interleaved
from phalanx.data.loader import StepBatch
from phalanx.launch.environment import Environment
from phalanx.launch.local import run_ranks
from phalanx.recipes.gpt import GPT
from report import Figure, report

BAR = 1.03
SHAPE = {
    "width": 256,
    "layers": 4,
    "heads": 4,
    "kv_heads": 4,
    "length": 256,
    "global_batch": 8,
    "megabytes": 1.0,
    "steps": 10_000,
}


def compare(kind: str, layout: str, pairs: int) -> list[tuple[float, float]]:
    """On a rank: seconds a step of Phalanx and of the loop by hand, in turns."""
    environment = Environment.detect()
    environment.join(environment.device("cpu"))
    task = GPT(**SHAPE)
    theirs = ByHand(task, kind)
    engine = phalanx.Engine(task, layout, device="cpu")
    batches: Iterator[StepBatch] = engine.batches()
    found = interleaved(
        lambda number: engine.step(next(batches)),
        lambda number: theirs.step(number, engine.order.ids(number)),
        pairs,
        time.perf_counter,
    )
    engine.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return found


def step_time(quick: bool) -> Iterator[Figure]:
    pairs = 16 if quick else 40
    for name, kind, layout, ranks in (
        ("step, one process, to a plain loop", "alone", "dp=1", 1),
        ("step, 2 ranks dp=2, to DDP", "ddp", "dp=2", 2),
        ("step, 2 ranks fsdp=2, to fully_shard", "fully_shard", "fsdp=2", 2),
    ):
        outcome = run_ranks(partial(compare, kind, layout, pairs), ranks)
        assert outcome.result is not None, outcome.failures
        ratios = [ours / theirs for ours, theirs in outcome.result]
        ours, theirs = (statistics.median(side) for side in zip(*outcome.result, strict=True))
        note = f"{ours * 1e3:.0f} ms to {theirs * 1e3:.0f} ms, median of {pairs} pairs"
        yield Figure(name, statistics.median(ratios), BAR, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a rough answer in under a minute")
    parser.add_argument("--only", choices=["step", "startup", "memory"])
    options = parser.parse_args()
    parts = {"step": step_time, "startup": startup.figures, "memory": memory.figures}
    figures = [f for name, part in parts.items() if options.only in (None, name) for f in part(options.quick)]
    report(figures)


if __name__ == "__main__":
    main()
