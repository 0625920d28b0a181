"""Bytes a rank sends in a step, by axis: counted where collectives are launched, against what the algebra says.

For b samples of T tokens on a rank, width D, L blocks, P weights, and e bytes an element, over n ranks, with
S = b T D e the stream and K = 2 b T D_kv e the keys and values of a block:

    dp           2 (n-1)/n P e                                   gradients, all-reduced
    fsdp zero 1  2 (n-1)/n P e                                   gradients reduced to rows, weights gathered
    fsdp zero 3  (n-1)/n (P + 2 P_blocks + 2 P_embed + P_after) e  weights for forward and for backward
    tp           (n-1)/n (8 L S + 2 S + 2 S + S + S) and the loss's rows  two containers a block, in and out, both ways;
                                                                 the embedding, the head, into and out of the blocks;
                                                                 norms' gradients, and those of keys held by several
    cp gather    (n-1)/n (2 L K + 2 S)                           keys and values there and back; the stream at the end
    cp ulysses   (n-1)/n 1/n L (4 S + 2 K)                       queries and outputs, keys and values, there and back
    pp           S                                               one boundary, one way
    ep           2 (r + s) D e                                   r choices of experts elsewhere, s of experts here from
                                                                 elsewhere: tokens out and results back, and gradients

What is small is in the algebra too: 72 bytes in which ranks agree, a loss's total, counts of tokens.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import phalanx
from phalanx.launch.local import run_ranks
from phalanx.models.experts import Router
from phalanx.recipes.gpt import GPT
from report import Figure

D, LAYERS, HEADS, KV_HEADS, TIME, BATCH, VOCABULARY = 64, 4, 4, 2, 64, 8, 256
E = 4
KV = D * KV_HEADS // HEADS


def task(experts: int = 0) -> GPT:
    return GPT(
        width=D, layers=LAYERS, heads=HEADS, kv_heads=KV_HEADS, length=TIME, global_batch=BATCH, megabytes=0.3, steps=3,
        experts=experts,
    )  # fmt: skip


def count(layout: str, experts: int) -> tuple[dict[str, int], dict[str, Any], float]:
    """On a rank: bytes of the last step by axis, facts for the algebra, and bytes on the wire for each counted."""
    away = torch.zeros(dist.get_world_size() if dist.is_initialized() else 64, dtype=torch.int64)
    with phalanx.Engine(task(experts), layout, device="cpu") as engine:
        for module in engine.spread.model.modules():
            if isinstance(module, Router):
                module.register_forward_hook(partial(_note, engine.layout.ep, away))
        wire, counted = [], []
        for batch in engine.batches():
            away.zero_()
            dist.barrier()
            before = _loopback()
            metrics = engine.step(batch)
            dist.barrier()
            wire.append(_loopback() - before)
            total = torch.tensor(float(sum(metrics.sent.values())))
            dist.all_reduce(total)
            counted.append(float(total))
        shapes = engine.spread.holding.shapes
        facts = {
            "P": sum(s.numel() for s in shapes.values()),
            "blocks": sum(s.numel() for n, s in shapes.items() if n.startswith("blocks")),
            "embed": shapes["embedding.weight"].numel(),
            "norms": sum(s.numel() for n, s in shapes.items() if n.startswith("blocks") and "norm" in n),
            "experts": sum(s.numel() for n, s in shapes.items() if "experts" in n),
            "travelling": _travelling(away[: engine.layout.ep], engine.mesh.index("ep")),
        }
    return metrics.sent, facts, statistics.median(w / c for w, c in zip(wire[1:], counted[1:], strict=True))


def _note(ranks: int, away: Tensor, router: Router, args: Any, output: Any) -> None:
    """How many choices fall on experts of each rank."""
    away[:ranks] += torch.bincount(output[1].reshape(-1) // (router.out_features // ranks), minlength=ranks)


def _travelling(away: Tensor, rank: int) -> int:
    """Choices of this rank's tokens elsewhere, and of others' tokens here."""
    if len(away) == 1:
        return 0
    every = [torch.empty_like(away) for _ in range(len(away))]
    dist.all_gather(every, away)
    table = torch.stack(every)
    return int(table[rank].sum() + table[:, rank].sum() - 2 * table[rank, rank])


def _loopback() -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[1])


def _share(n: int) -> float:
    return (n - 1) / n


def _agree(n: int) -> float:
    return 2 * _share(n) * 72


def _stream(samples: int) -> int:
    return samples * TIME * D * E


def dp(n: int, f: dict[str, Any]) -> float:
    return 2 * _share(n) * f["P"] * E + _agree(n)


def zero3(n: int, f: dict[str, Any]) -> float:
    after = f["P"] - f["blocks"] - f["embed"]
    return _share(n) * (f["P"] + 2 * f["blocks"] + 2 * f["embed"] + after) * E + _agree(n)


def tp(n: int, f: dict[str, Any]) -> float:
    rows = BATCH * TIME
    loss = 2 * _share(n) * rows * (1 + 3) * E
    norms = (n - 1) * f["norms"] * E
    keys = max(0, n // KV_HEADS - 1) * 2 * LAYERS * D * (D // HEADS) * E
    return _share(n) * (8 * LAYERS + 2 + 2 + 1 + 1) * _stream(BATCH) + loss + norms + keys + _agree(n)


def _state(n: int, f: dict[str, Any]) -> float:
    return 2 * _share(n) * f["P"] * E


def gathered(n: int, f: dict[str, Any]) -> float:
    keys = 2 * BATCH * TIME * KV * E
    return _share(n) * (2 * LAYERS * keys + 2 * _stream(BATCH)) + _state(n, f) + 2 * 2 * _share(n) * E + _agree(n)


def ulysses(n: int, f: dict[str, Any]) -> float:
    keys = 2 * BATCH * TIME * KV * E
    heads = _share(n) / n * LAYERS * 2 * (2 * _stream(BATCH) + keys)
    return heads + _share(n) * 2 * _stream(BATCH) + _state(n, f) + 2 * 2 * _share(n) * E + _agree(n)


def pp(n: int, f: dict[str, Any]) -> float:
    return _stream(BATCH) + _agree(n)


def ep(n: int, f: dict[str, Any]) -> float:
    dense = f["P"] - f["experts"]
    counts = LAYERS * _share(n) * 8 * 8
    return 2 * f["travelling"] * D * E + counts + 2 * _share(n) * dense * E + _agree(n)


CASES: list[tuple[str, int, Callable[[int, dict[str, Any]], float]]] = [
    ("dp=4", 0, dp),
    ("fsdp=4,zero=1", 0, dp),
    ("fsdp=4,zero=2", 0, dp),
    ("fsdp=4,zero=3", 0, zero3),
    ("tp=2", 0, tp),
    ("tp=4", 0, tp),
    ("cp=2,zero=1", 0, gathered),
    ("cp=4,zero=1", 0, gathered),
    ("cp=2,zero=1,cp_kind=ulysses", 0, ulysses),
    ("pp=2,micro_batch=2", 0, pp),
    ("pp=4,micro_batch=2", 0, pp),
    ("pp=2,micro_batch=2,schedule=zb", 0, pp),
    ("fsdp=4,zero=1,ep=4", 8, ep),
]


def figures(quick: bool) -> Iterator[Figure]:
    for layout, experts, algebra in CASES[::3] if quick else CASES:
        ranks = phalanx.Layout.parse(layout).world
        outcome = run_ranks(partial(count, layout, experts), ranks)
        assert outcome.result is not None, outcome.failures
        sent, facts, wire = outcome.result
        counted, expected = sum(sent.values()), algebra(ranks, facts)
        axes = ", ".join(f"{axis} {size:,}" for axis, size in sorted(sent.items()))
        note = (
            f"{counted:,} bytes counted ({axes}), {expected:,.0f} by algebra; {wire:.2f} on the wire for each counted"
        )
        yield Figure(f"traffic, {layout}, off the algebra by", abs(counted / expected - 1), 1e-4, note)
