"""Every valid layout of a world, and the hostile task that it is tried on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from phalanx import Layout, Task
from phalanx.parallel.schedules import CHUNKS
from tests.parity import HostileLanguage, Mixture

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb")
KINDS = ("gather", "ulysses")
PIPELINED = 4
"""Micro-batches, where there is a pipeline."""


def factorizations(world: int, axes: int) -> Iterator[tuple[int, ...]]:
    degrees = [n for n in range(1, world + 1) if world % n == 0]
    for found in itertools.product(degrees, repeat=axes - 1):
        rest, odd = divmod(world, math.prod(found))
        if rest and not odd:
            yield (*found, rest)


def every_layout(world: int, *, experts: bool) -> Iterator[Layout]:
    """All factorizations over dp, fsdp, tp, cp and pp, with all ZeRO stages, schedules and kinds of cp.

    With ``experts``, all degrees of ep above 1. Blocks are recomputed in every second layout.
    """
    count = 0
    for dp, fsdp, tp, cp, pp in factorizations(world, 5):
        shards = fsdp * cp
        for zero, schedule, kind, ep in itertools.product(
            (3, 2, 1) if shards > 1 else (3,),
            SCHEDULES if pp > 1 else SCHEDULES[:1],
            KINDS if cp > 1 else KINDS[:1],
            [n for n in (2, 4, 8) if shards % n == 0] if experts else [1],
        ):
            count += 1
            share = -(-HostileLanguage.global_batch // (dp * fsdp))
            yield Layout(
                dp=dp, fsdp=fsdp, tp=tp, cp=cp, pp=pp, ep=ep, zero=zero, schedule=schedule, cp_kind=kind,
                recompute=("none", "full")[count % 2], micro_batch=-(-share // PIPELINED) if pp > 1 else None,
            )  # fmt: skip


def task_for(layout: Layout) -> Task:
    """With as many heads and blocks as the layout needs, and experts if it spreads them."""
    many = layout.tp > 2 or (layout.cp_kind == "ulysses" and layout.tp * layout.cp > 2)
    layers = max(2, layout.pp * CHUNKS.get(layout.schedule if layout.pp > 1 else "", 1))
    kind = Mixture if layout.ep > 1 else HostileLanguage
    return kind(layers=layers, heads=8 if many else 2, kv_heads=2 if many else 1)


def covering(layouts: list[Layout]) -> list[Layout]:
    """Some of them, in which every two settings that meet in any layout meet, if neither is what it is anyway."""

    def pairs(layout: Layout) -> set[tuple[tuple[str, object], ...]]:
        derived = {"micro_batch": layout.micro_batch, "recompute": layout.recompute}
        settings = sorted(vars(layout).items() - vars(Layout()).items() - derived.items())
        return {*itertools.combinations(settings, 2), *itertools.combinations(settings, 1)}

    left = set().union(*map(pairs, layouts))
    chosen = []
    while left:
        chosen.append(max(layouts, key=lambda layout: len(pairs(layout) & left)))
        left -= pairs(chosen[-1])
    return chosen
