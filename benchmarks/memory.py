"""Memory: the peak of a rank at fsdp=4 under ZeRO 1, 2 and 3, against what arithmetic says it must hold.

The system's own count is taken: a process's peak resident memory while it trains, less what it held before the model
was made and less the pages of libraries, which all ranks share. The C library is told to map every large block by
itself, or the holes in its heap would be counted too; what they add as it comes stands in the note. The arithmetic, in
bytes, for P weights over n ranks in float32 with AdamW, and B weights in the largest bucket:

    ZeRO 1   4P   + 4P   + 8P/n + 2 x 4B    whole weights and gradients, moments; a bucket on its way, and the next
    ZeRO 2   4P   + 4P/n + 8P/n + 3 x 4B    gradients being made, on their way, and coming back
    ZeRO 3   4P/n + 4P/n + 8P/n + 5 x 4B    and weights in use, and on their way
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

import phalanx
from phalanx.launch.local import run_ranks
from phalanx.recipes.gpt import GPT
from report import Figure

RANKS = 4
BAR = 0.10
M_MMAP_THRESHOLD = -3


def figures(quick: bool) -> Iterator[Figure]:
    layers = 12 if quick else 24
    for zero in (1, 2, 3):
        measured, expected = _on_ranks(zero, layers, map_large=True)
        note = f"{measured / 2**20:.0f} MiB measured, {expected / 2**20:.0f} MiB by arithmetic"
        if not quick:
            with_holes, _ = _on_ranks(zero, layers, map_large=False)
            note += f"; {with_holes / 2**20:.0f} MiB with the heap as it comes"
        yield Figure(
            f"memory, fsdp={RANKS},zero={zero}, off the arithmetic by", abs(measured / expected - 1), BAR, note
        )


def _on_ranks(zero: int, layers: int, map_large: bool) -> tuple[int, int]:
    outcome = run_ranks(partial(peak, zero, layers, map_large), RANKS)
    assert outcome.result is not None, outcome.failures
    return outcome.result


def peak(zero: int, layers: int, map_large: bool) -> tuple[int, int]:
    """On a rank: bytes at the peak of three steps, and bytes by arithmetic."""
    if map_large:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 17)
    task = GPT(
        width=768, layers=layers, heads=8, kv_heads=8, length=4, global_batch=2 * RANKS, megabytes=0.3, steps=3,
        warmup_steps=1,
    )  # fmt: skip
    torch.ones(64, 64) @ torch.ones(64, 64)  # libraries that the first product loads are not the model's
    before, libraries = status("VmRSS"), status("RssFile")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    layout = f"fsdp={RANKS},zero={zero},micro_batch=1"
    with phalanx.Engine(task, layout, device="cpu") as engine:
        for batch in engine.batches():
            engine.step(batch)
        measured = status("VmHWM") - before - (status("RssFile") - libraries)
        weights = sum(weight.rows * weight.row_size for weight in engine.spread.weights.values())
        largest = max(bucket.packing.length * RANKS for bucket in engine.spread.buckets)
    return measured, arithmetic(zero, weights, largest)


def arithmetic(zero: int, weights: int, bucket: int) -> int:
    share = weights // RANKS
    states = {1: 8 * weights + 8 * share, 2: 4 * weights + 12 * share, 3: 16 * share}
    buckets = {1: 2, 2: 3, 3: 5}
    return states[zero] + buckets[zero] * 4 * bucket


def status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
