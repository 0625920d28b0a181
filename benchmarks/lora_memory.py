"""Memory of LoRA and QLoRA: the peak of a rank at fsdp=4 with a frozen base, against what arithmetic says it must hold.

    python benchmarks/lora_memory.py [--quick]

Counted as in `memory.py`: a process's peak resident memory while it trains, less what it held before and less the pages
of libraries, with large blocks mapped by themselves. What oneDNN keeps of each shape of product in bf16 on a CPU is no
weight: a model of one such layer is trained first, and let go. Modules, hooks and threads count: they take some 20 MiB,
of which blocks as wide as a 7B model's make little. The arithmetic, in bytes, for F frozen weights of
``b`` bytes each and P trained ones over n ranks, B bytes of a block's whole weights, T trained ones of a block, and N
elements of the largest linear:

    LoRA     bF/n + 16P/n + 2B + 8T       weights, gradients and moments; a block in use, and the next on its way; its
                                          adapters' gradients as they are made, and as they come from the others
    QLoRA    the same          + 2N       and one linear's weight that is made from its 4 bits, some at a time

Samples have so few tokens that activations are a percent.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import phalanx
from memory import M_MMAP_THRESHOLD, status
from phalanx.kernels.nf4 import AT_ONCE
from phalanx.launch.local import run_ranks
from phalanx.recipes.sft import SFT
from phalanx.train.memory import fullest
from report import Figure, report

RANKS = 4
BAR = 0.10
KINDS = {"LoRA in bf16": ("bf16", False), "LoRA in fp32": ("fp32", False), "QLoRA in bf16": ("bf16", True)}
TOKENS = 4
WIDTH, LAYERS = 4096, 4
QUICK_WIDTH, QUICK_LAYERS = 768, 12


@dataclass
class Tuned(SFT):
    """A base of any size, and samples of a few tokens."""

    layers: int = LAYERS
    width: int = WIDTH

    def tiny_config(self) -> Any:
        config = super().tiny_config()
        config.hidden_size, config.intermediate_size = self.width, 4 * self.width
        config.num_hidden_layers, config.head_dim = self.layers, self.width // config.num_attention_heads
        config.num_key_value_heads = config.num_attention_heads
        return config

    def data(self) -> Any:
        place = torch.arange(TOKENS)
        return [
            {"tokens": place + i, "targets": place + i + 1, "positions": place, "documents": 0 * place}
            for i in range(32)
        ]

    def held_out(self) -> None:
        return None


def figures(quick: bool) -> Iterator[Figure]:
    shape = (QUICK_LAYERS, QUICK_WIDTH) if quick else (LAYERS, WIDTH)
    for name, (precision, four_bit) in KINDS.items():
        found, expected = measured(precision, four_bit, *shape)
        note = f"{found / 2**20:.1f} MiB measured, {expected / 2**20:.1f} MiB by arithmetic"
        bar = None if quick else BAR
        yield Figure(f"peak memory, {name}, fsdp={RANKS}, off the arithmetic by", abs(found / expected - 1), bar, note)


def measured(precision: Any, four_bit: bool, layers: int, width: int) -> tuple[int, int]:
    outcome = run_ranks(partial(peak, precision, four_bit, layers, width), RANKS)
    assert outcome.result is not None, outcome.failures
    return outcome.result


def peak(precision: Any, four_bit: bool, layers: int, width: int) -> tuple[int, int]:
    """On a rank: bytes at the peak of three steps, and bytes by arithmetic."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 17)
    task = partial(
        Tuned, width=width, lora=8, four_bit=four_bit, precision=precision,
        base_dtype="bf16" if precision == "bf16" else "saved", packed=False, global_batch=RANKS, warmup_steps=1,
        steps=3, share_held_out=0.0,
    )  # fmt: skip
    trained(task(layers=1))
    gc.collect()
    libc.malloc_trim(0)
    before, libraries = status("VmRSS"), status("RssFile")
    with phalanx.Engine(task(layers=layers), f"fsdp={RANKS}", device="cpu") as engine:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far, and that of making weights
        for batch in engine.batches():
            engine.step(batch)
        return status("VmHWM") - before - (status("RssFile") - libraries), arithmetic(engine)


def trained(task: phalanx.Task) -> None:
    with phalanx.Engine(task, f"fsdp={RANKS}", device="cpu") as engine:
        for batch in engine.batches():
            engine.step(batch)


def arithmetic(engine: phalanx.Engine) -> int:
    """What lies between steps, and what a step adds to it."""
    blocks, trained_ones = dict[str, int](), dict[str, int]()
    for bucket in engine.spread.buckets:
        whole = bucket.packing.length * RANKS * bucket.storage.compute.itemsize
        blocks[bucket.name] = blocks.get(bucket.name, 0) + whole
        adapters = bucket.gradient_packing.length * RANKS * bucket.storage.reduce.itemsize
        trained_ones[bucket.name] = trained_ones.get(bucket.name, 0) + adapters
    under_way = 2 * max(blocks.values()) + 2 * max(trained_ones.values())
    weights = engine.spread.weights.values()
    packed = [weight.rows * weight.row_size for weight in weights if weight.name.endswith("packed")]
    linear = 2 * max(packed, default=0)
    state = fullest(engine.spread.placement, engine.kept, engine.dtypes).total
    return state + under_way + 2 * linear + 6 * min(linear, AT_ONCE[True])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    report(list(figures(parser.parse_args().quick)))
