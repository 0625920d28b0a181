"""What optimizers of whole matrices cost: a step with each of them against one with AdamW, on 4 shards.

    python benchmarks/optimizers.py [--quick]

Both sides run in the same processes, in turns, and the figure is the median of their ratios. SOAP renews its bases
every 10 steps. torch's Muon multiplies in bfloat16: where the processor cannot, its products are computed in float32
and rounded, since torch would take a hundred times as long for them as for all else.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

import phalanx
from by_hand import interleaved
from phalanx.launch.environment import Environment
from phalanx.launch.local import run_ranks
from phalanx.precision import DTYPES
from phalanx.recipes.gpt import GPT
from report import Figure, report

BAR = 1.15
LAYOUT = "fsdp=4"
SHAPE: dict[str, Any] = {
    "width": 128, "layers": 4, "heads": 4, "kv_heads": 4, "length": 256, "global_batch": 32, "megabytes": 1.0,
    "steps": 10_000, "precision": "fp32",
}  # fmt: skip
KINDS = ("Muon", "Adafactor", "SOAP")
PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, torch.addmm, Tensor.addmm)


class Rounded(TorchFunctionMode):
    """Products of bfloat16 in float32, rounded."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in PRODUCTS and args[0].dtype == torch.bfloat16:
            return function(*(arg.float() for arg in args), **(kwargs or {})).bfloat16()
        return function(*args, **(kwargs or {}))


class Muon(torch.optim.Muon):
    """torch's, on processors that have no arithmetic in bfloat16 too."""

    def step(self, closure: Any = None) -> Any:
        with Rounded() if DTYPES["bf16"].notes("cpu") else nullcontext():
            return super().step(closure)


@dataclass
class Optimized(GPT):
    kind: str = "AdamW"

    def optimizer(self, params: Any) -> Any:
        if self.kind == "Muon":  # of the blocks' matrices, as its authors have it
            hidden = [p for p in params if p.ndim == 2 and p.logical_name.startswith("blocks")]
            rest = [p for p in params if not any(p is other for other in hidden)]
            return {"hidden": Muon(hidden, lr=1e-3), "rest": torch.optim.AdamW(rest, lr=1e-3, fused=True)}
        if self.kind == "Adafactor":
            return torch.optim.Adafactor(params, lr=1e-3)
        if self.kind == "SOAP":
            return phalanx.optim.SOAP(params, lr=1e-3)
        return super().optimizer(params)


def compare(kind: str, pairs: int) -> tuple[list[tuple[float, float]], list[float]]:
    """On a rank: seconds a step with this optimizer and with AdamW, in turns; and of them, of each update."""
    environment = Environment.detect()
    environment.join(environment.device("cpu"))
    torch.set_num_threads(1)
    engines = [phalanx.Engine(Optimized(**SHAPE, kind=name), LAYOUT, device="cpu") for name in (kind, "AdamW")]
    batches = [engine.batches() for engine in engines]
    updates: list[list[float]] = [[], []]

    def step(side: int, number: int) -> None:
        updates[side].append(engines[side].step(next(batches[side])).seconds["update"])

    found = interleaved(partial(step, 0), partial(step, 1), pairs, time.perf_counter)
    for engine in reversed(engines):
        engine.close()
    dist.destroy_process_group()
    return found, [statistics.median(side) for side in updates]


def figures(quick: bool) -> Iterator[Figure]:
    pairs = 3 if quick else 24
    for kind in KINDS:
        outcome = run_ranks(partial(compare, kind, pairs), phalanx.Layout.parse(LAYOUT).world)
        assert outcome.result is not None, outcome.failures
        found, updates = outcome.result
        ours, theirs = (statistics.median(side) * 1e3 for side in zip(*found, strict=True))
        update = " and ".join(f"{seconds * 1e3:.0f}" for seconds in updates)
        note = f"{ours:.0f} ms, AdamW {theirs:.0f} ms, of them {update} ms to update; median of {pairs} pairs"
        yield Figure(f"step, {LAYOUT}, {kind} to AdamW", statistics.median(a / b for a, b in found), BAR, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a rough answer in under a minute")
    report(list(figures(parser.parse_args().quick)))


if __name__ == "__main__":
    main()
