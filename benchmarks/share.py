"""Memory: how the peak of a rank falls with tp, pp and cp, against what arithmetic says.

tp and pp divide weights, gradients and moments: 16 bytes in float32 with AdamW for each weight that a rank holds.
Sequences are short there, so that little else counts. cp divides what blocks keep for their backward; sequences are
long there, and what one device keeps is measured on one. What cp does not divide: the stream around the blocks; with
``gather`` keys and values, and a mask for the chunk from the back, which all blocks share.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import phalanx
from memory import M_MMAP_THRESHOLD, status
from phalanx.launch.local import run_ranks
from phalanx.recipes.gpt import GPT
from report import Figure

BAR = 0.10
ENDS = 5
"""Streams kept whole around the blocks: what the first takes, what the last gives, its norm's, and two gradients."""
WIDE: dict[str, Any] = {
    "width": 768, "layers": 16, "heads": 8, "kv_heads": 8, "length": 8, "global_batch": 4, "megabytes": 0.3, "steps": 3,
    "warmup_steps": 1,
}  # fmt: skip
LONG: dict[str, Any] = WIDE | {
    "width": 128, "layers": 16, "kv_heads": 1, "length": 4096, "global_batch": 2, "steps": 2,
}  # fmt: skip


def peak(shape: dict[str, Any], layout: str) -> tuple[int, int]:
    """On a rank: bytes at the peak of its steps, and how many weights it holds."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 17)
    torch.ones(64, 64) @ torch.ones(64, 64)  # libraries that the first product loads are not the model's
    before, libraries = status("VmRSS"), status("RssFile")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    with phalanx.Engine(Plain(**shape), layout, device="cpu") as engine:
        for batch in engine.batches():
            engine.step(batch)
        measured = status("VmHWM") - before - (status("RssFile") - libraries)
        return measured, sum(weight.rows * weight.row_size for weight in engine.spread.weights.values())


class Plain(GPT):
    """Without masks of packed documents, which would be as large as time squared."""

    def inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": batch["tokens"]}


def _on_ranks(shape: dict[str, Any], layout: str) -> tuple[int, int]:
    outcome = run_ranks(partial(peak, shape, layout), phalanx.Layout.parse(layout).world)
    assert outcome.result is not None, outcome.failures
    return outcome.result


def figures(quick: bool) -> Iterator[Figure]:
    alone, weights = _on_ranks(WIDE, "dp=1")
    yield _figure("dp=1", alone, 16 * weights)
    for layout in ("tp=2",) if quick else ("tp=2", "tp=4", "pp=2,micro_batch=4", "pp=4,micro_batch=4"):
        measured, held = _on_ranks(WIDE, layout)
        yield _figure(layout, measured, 16 * held)
    alone, weights = _on_ranks(LONG, "dp=1")
    stream = LONG["global_batch"] * LONG["length"] * LONG["width"] * 4
    keys = 2 * stream // 8 * LONG["layers"]  # one key-value head of eight
    kept = alone - 16 * weights
    for layout in ("cp=2,zero=1",) if quick else ("cp=2,zero=1", "cp=4,zero=1", "cp=4,zero=1,cp_kind=ulysses"):
        parsed = phalanx.Layout.parse(layout)
        measured, _ = _on_ranks(LONG, layout)
        divided = kept - ENDS * stream
        whole = ENDS * stream
        divided, whole = divided - keys, whole + keys  # of one head, which every rank has at least
        if parsed.cp_kind == "gather":
            whole += LONG["length"] // (2 * parsed.cp) * LONG["length"] * 4
        states = 8 * weights + 8 * weights // parsed.cp
        expected = states + whole + divided / parsed.cp
        yield _figure(layout, measured, expected, f", {alone / 2**20:.0f} MiB on one rank")


def _figure(layout: str, measured: float, expected: float, more: str = "") -> Figure:
    note = f"{measured / 2**20:.0f} MiB measured, {expected / 2**20:.0f} MiB by arithmetic{more}"
    return Figure(f"memory, {layout}, off the arithmetic by", abs(measured / expected - 1), BAR, note)
