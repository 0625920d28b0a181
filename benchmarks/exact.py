"""What the same bits at any number of ranks cost: exact sums against ordinary ones, with the same micro-batches.

    python benchmarks/exact.py [--quick]

Both sides run in the same processes, in turns, and the figure is the median of their ratios. Then the same task is
trained at 1, 2, 4 and 8 ranks, and its weights are hashed.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist

import phalanx
from by_hand import interleaved
from phalanx.launch.environment import Environment
from phalanx.launch.local import run_ranks
from phalanx.recipes.gpt import GPT
from report import Figure, report

BAR = 1.3
SHAPE = {"width": 256, "layers": 4, "heads": 4, "kv_heads": 4, "length": 256, "megabytes": 1.0, "steps": 10_000}
PAIRS = (
    ("1 rank", "micro_batch=1", "exact=8"),
    ("2 replicas", "dp=2,micro_batch=1", "dp=2,exact=8"),
    ("2 shards, ZeRO 3", "fsdp=2,micro_batch=1", "fsdp=2,exact=8"),
    ("2 shards, ZeRO 2", "fsdp=2,zero=2,micro_batch=1", "fsdp=2,zero=2,exact=8"),
    ("2 shards, ZeRO 1", "fsdp=2,zero=1,micro_batch=1", "fsdp=2,zero=1,exact=8"),
)
WORLDS = ("exact=8", "dp=2,exact=8", "fsdp=4,exact=8", "dp=2,fsdp=4,zero=2,exact=8", "dp=8,exact=8")


def compare(ordinary: str, exact: str, pairs: int) -> tuple[list[tuple[float, float]], list[int]]:
    """On a rank: seconds a step of both, in turns, and the bytes that each sent in the last one."""
    environment = Environment.detect()
    environment.join(environment.device("cpu"))
    torch.set_num_threads(1)
    task = GPT(**SHAPE, global_batch=8)
    engines = [phalanx.Engine(task, layout, device="cpu") for layout in (exact, ordinary)]
    batches = [engine.batches() for engine in engines]
    sent = [0, 0]

    def step(side: int, number: int) -> None:
        torch.use_deterministic_algorithms(side == 0)  # the exact engine asked for it, for the whole process
        sent[side] = sum(engines[side].step(next(batches[side])).sent.values())

    found = interleaved(partial(step, 0), partial(step, 1), pairs, time.perf_counter)
    for engine in reversed(engines):
        engine.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return found, sent


def cost(quick: bool) -> Iterator[Figure]:
    pairs = 5 if quick else 24
    for name, ordinary, exact in PAIRS[:3] if quick else PAIRS:
        outcome = run_ranks(partial(compare, ordinary, exact, pairs), phalanx.Layout.parse(exact).world)
        assert outcome.result is not None, outcome.failures
        found, sent = outcome.result
        ours, theirs = (statistics.median(side) for side in zip(*found, strict=True))
        note = f"{exact} {ours * 1e3:.0f} ms, {ordinary} {theirs * 1e3:.0f} ms, median of {pairs} pairs"
        yield Figure(f"step, {name}", statistics.median(a / b for a, b in found), BAR, note)
        if sent[1]:
            bytes_note = f"{sent[0]:,} to {sent[1]:,} bytes of a rank in a step"
            yield Figure(f"bytes, {name}", sent[0] / sent[1], BAR, bytes_note)


def trained(layout: str, steps: int) -> str:
    """On a rank: a hash of all weights after so many steps, and of every loss and norm."""
    small: dict[str, Any] = SHAPE | {"length": 64, "steps": steps}
    with phalanx.Engine(GPT(**small, global_batch=16), layout, device="cpu") as engine:
        told = [(metrics.loss, metrics.grad_norm) for metrics in map(engine.step, engine.batches())]
        found = hashlib.sha256(repr(told).encode())
        for name, tensor in sorted(engine.whole_weights().items()):
            found.update(name.encode() + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def same_bits(quick: bool) -> Iterator[Figure]:
    steps, hashes = 5 if quick else 20, []
    for layout in WORLDS:
        world = phalanx.Layout.parse(layout).world
        outcome = run_ranks(partial(trained, layout, steps), world)
        assert outcome.result is not None, outcome.failures
        hashes.append(outcome.result)
        print(f"{outcome.result}  {layout}, {world} ranks, {steps} steps", flush=True)
    yield Figure("different weights at 1, 2, 4 and 8 ranks", len(set(hashes)) - 1, 0, f"{hashes[0][:16]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a rough answer in about a minute")
    options = parser.parse_args()
    report([*same_bits(options.quick), *cost(options.quick)])


if __name__ == "__main__":
    main()
