"""What narrow moments cost: the loss after training with them against AdamW's in float32, bytes, and time of an update.

    python benchmarks/moments.py [--quick]

A small language model is trained on one device from several seeds with each kind of moments. One run's loss differs
from another's by a percent whatever the rounding, so the figure is the mean over seeds. An update is timed on a CPU,
where the plain twin does it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch import nn

import phalanx
from phalanx.kernels.moments import DTYPES, Moments
from phalanx.recipes.gpt import GPT
from report import Figure, report

BAR = 1.01
SHAPE: dict[str, Any] = {"width": 64, "layers": 2, "length": 64, "global_batch": 8, "megabytes": 2.0}
ELEMENTS = 1 << 21


def loss(moments: Moments, seed: int, steps: int) -> float:
    """Of held-out text."""
    with phalanx.Engine(GPT(**SHAPE, steps=steps, seed=seed, moments=moments), "dp=1", device="cpu") as engine:
        for batch in engine.batches():
            engine.step(batch)
        return engine.evaluate()["loss"]


def update(moments: Moments) -> float:
    """Nanoseconds an element, of this process alone."""
    weight = nn.Parameter(torch.randn(ELEMENTS // 1024, 1024))
    weight.grad = torch.randn_like(weight)
    optimizer = GPT(moments=moments).optimizer([weight])
    assert isinstance(optimizer, torch.optim.Optimizer)
    found = []
    for _ in range(4):
        began = time.process_time()
        optimizer.step()
        found.append(time.process_time() - began)
    return min(found) / ELEMENTS * 1e9


def figures(quick: bool) -> Iterator[Figure]:
    seeds, steps = (1, 60) if quick else (5, 300)
    wide = [loss("float32", seed, steps) for seed in range(seeds)]
    print(f"float32   loss of held-out text {[round(value, 3) for value in wide]}", flush=True)
    for moments in get_args(Moments):
        name = f"{moments} moments"
        yield Figure(f"{name}, bytes an element", 2 * DTYPES[moments].itemsize)
        yield Figure(f"{name}, update, ns an element", update(moments), note="one thread")
        if moments == "float32":
            continue
        found = [loss(moments, seed, steps) for seed in range(seeds)]
        print(f"{moments:<9} loss of held-out text {[round(value, 3) for value in found]}", flush=True)
        ratios = [ours / theirs for ours, theirs in zip(found, wide, strict=True)]
        note = f"mean of {seeds} seeds, {min(ratios):.3f} to {max(ratios):.3f}; {steps} steps"
        yield Figure(f"{name}, loss to float32", statistics.mean(ratios), None if quick else BAR, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a rough answer in under a minute")
    torch.set_num_threads(1)
    report(list(figures(parser.parse_args().quick)))


if __name__ == "__main__":
    main()
