"""On one GPU: whether a step there is the CPU's step, in every mode that a GPU adds; and how fast a 1.5B model trains.

python benchmarks/gpu.py [--only agreement|speed]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import phalanx
from phalanx.data import Arrays
from phalanx.models.transformer import Transformer, TransformerConfig
from phalanx.recipes.gpt import GPT
from report import Figure, report

Gradients = dict[str, Tensor]
SMALL: dict[str, Any] = {"width": 96, "layers": 3, "dropout": 0.1, "tied": True, "global_batch": 8, "megabytes": 0.3}


class Noted(phalanx.Callback):
    """Notes summed gradients, whole and before clipping."""

    def __init__(self, found: Gradients) -> None:
        self.found = found

    def on_gradients(self, engine: Any, divisor: float, without: set[str]) -> None:
        whole = engine.whole_gradients(divisor, without)
        self.found.update({name: gradient for name, gradient in whole.items() if gradient is not None})


def gradients(layout: str, device: str, precision: str = "fp32", experts: int = 0) -> Gradients:
    """The first step's, whole and before clipping."""
    found: Gradients = {}
    task = GPT(**SMALL, precision=precision, experts=experts)  # type: ignore[arg-type]
    with phalanx.Engine(task, layout, device=device) as engine:
        engine.callbacks.add(Noted(found))
        engine.step(next(engine.batches()))
    return {name: gradient.double().cpu() for name, gradient in found.items()}


def apart(ours: Gradients, theirs: Gradients) -> float:
    """The largest difference of a tensor, relative to that tensor's largest element."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max()) for n in theirs)


def agreement() -> Iterator[Figure]:
    torch.set_float32_matmul_precision("highest")
    on_cpu = gradients("dp=1", "cpu")
    yield Figure("float32 step, GPU to CPU", apart(gradients("dp=1", "cuda"), on_cpu), 1e-4, "worst tensor, relative")
    exact = gradients("dp=1", "cpu", "float64")
    yield Figure("float64 step, GPU to CPU", apart(gradients("dp=1", "cuda", "float64"), exact), 1e-9, "likewise")
    for mode in ("micro_batch=2", "recompute=full", "recompute=selective", "offload=optimizer", "offload=params"):
        off = apart(gradients(f"dp=1,{mode}", "cuda", "float64"), exact)
        yield Figure(f"float64 step, {mode}, GPU to CPU", off, 1e-9, "likewise")
    compiled = gradients("dp=1,compile=blocks", "cuda")
    yield Figure("float32 step, compile=blocks, GPU to CPU", apart(compiled, on_cpu), 1e-4, "likewise")
    for precision, bar in (("bf16", 0.1), ("fp16", 0.02)):
        off = apart(gradients("dp=1", "cuda", precision), on_cpu)
        yield Figure(f"{precision} step on the GPU to float32", off, bar, "likewise")
    exact = gradients("dp=1", "cpu", "float64", experts=8)
    off = apart(gradients("dp=1", "cuda", "float64", experts=8), exact)
    yield Figure("float64 step, 8 experts, GPU to CPU", off, 1e-9, "likewise")
    grouped = {n: g for n, g in gradients("dp=1", "cuda", "bf16", experts=8).items() if "experts" in n}
    off = apart(grouped, {n: exact[n] for n in grouped})
    yield Figure("bf16 step, 8 experts by grouped products, to float64", off, 0.2, "worst weight of experts, relative")


def learning() -> Iterator[Figure]:
    """The recipe in bf16 as a user would run it, by its loss at the end over that at the start."""
    with phalanx.Engine(GPT(precision="bf16"), "dp=1", device="cuda") as engine:
        losses = [engine.step(batch).loss for batch in engine.batches()]
    note = f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps"
    yield Figure("gpt in bf16, last loss to first", losses[-1] / losses[0], 0.5, note)


@dataclass
class Llama(phalanx.Task):
    """Llama 3.2 1B's shape with a head of its own, 1.5 billion weights, on random tokens."""

    length: int = 8192
    global_batch: int = 2
    precision: phalanx.task.Precision = "bf16"
    steps: int = 1000
    layers: int = 16

    counts = "tokens"

    def model(self) -> nn.Module:
        return Transformer(TransformerConfig(
            vocabulary=128_256, width=2048, layers=self.layers, heads=32, kv_heads=8, hidden=8192, rope_base=500_000.0,
        ))  # fmt: skip

    def data(self) -> Arrays:
        return Arrays(tokens=np.random.default_rng(0).integers(0, 128_256, (64, self.length + 1), dtype=np.int64))

    def inputs(self, batch: dict[str, Any]) -> Any:
        return batch["tokens"][:, :-1]

    def loss(self, output: Any, batch: dict[str, Any]) -> phalanx.Loss:
        return phalanx.losses.cross_entropy(output, batch["tokens"][:, 1:])


def speed() -> Iterator[Figure]:
    for layout, batch in (("dp=1", 2), ("dp=1,compile=blocks", 2), ("dp=1,compile=blocks,recompute=selective", 4)):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        with phalanx.Engine(Llama(global_batch=batch), layout, device="cuda") as engine:
            ready = time.perf_counter() - started
            times, phases = [], {}
            for number, batch_ in zip(range(13), engine.batches(), strict=False):
                before = time.perf_counter()
                metrics = engine.step(batch_)  # waits for the device
                if number >= 3:
                    times.append(time.perf_counter() - before)
                    phases = metrics.seconds
        tokens = batch * 8192 / statistics.median(times)
        laps = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in phases.items())
        note = f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB; {laps}; ready in {ready:.0f} s"
        yield Figure(f"tokens a second, 1.5B, {batch} x 8192, {layout}", tokens, None, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("agreement", "speed"))
    only = parser.parse_args().only
    figures: list[Figure] = []
    for name, part in (("agreement", agreement), ("agreement", learning), ("speed", speed)):
        if only in (None, name):
            for figure in part():
                print(figure, flush=True)
                figures.append(figure)
    report(figures)


if __name__ == "__main__":
    main()
