"""On one GPU: whether a step there is the CPU's step, in every mode that a GPU adds; and how fast a 1.5B model trains.

python benchmarks/gpu.py [--only agreement|speed]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import phalanx
from phalanx.bench.table import bench, setting_of
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
    for mode in (
        "micro_batch=2",
        "recompute=full",
        "recompute=selective",
        "recompute=host",
        "offload=optimizer",
        "offload=params",
    ):
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


def speed() -> Iterator[Figure]:
    """A 1.5B Llama shape in bf16, 4 x 4096 tokens: beside others, in one run; and ours in 8 bits."""
    table = bench(setting_of("cuda", "bf16"), ("torchtitan", "phalanx", "phalanx-hf", "accelerate"), print)
    print(table)
    found, narrow = table.found, bench(setting_of("cuda", "fp8"), ("phalanx",), print).found["phalanx"]
    for name, told in {**found, "phalanx in 8 bits": narrow}.items():
        note = f"{told['ms']:.1f} ms a step, {told['gib']:.1f} GiB; first step {told['first_step_s']:.0f} s"
        yield Figure(f"tokens a second, 1.5B, 4 x 4096, {name}", told["tokens_per_s"], None, note)
    own = found["phalanx"]
    yield Figure("a Hugging Face Llama's step to our model's", found["phalanx-hf"]["ms"] / own["ms"], 1.03)
    if titan := found.get("torchtitan"):
        yield Figure("torchtitan's tokens a second to ours", titan["tokens_per_s"] / own["tokens_per_s"], 1 / 1.1)
        yield Figure("likewise, to ours in 8 bits", titan["tokens_per_s"] / narrow["tokens_per_s"], 1 / 1.4)
        yield Figure("our memory to torchtitan's", own["gib"] / titan["gib"], 1.0)
    yield Figure("first step, seconds", own["first_step_s"], 60)


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
