"""Every valid layout of a world, and the hostile task that it is tried on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from phalanx import Layout, Task
from phalanx.prove.layouts import every
from tests.parity import HostileLanguage, Mixture

PIPELINED = 4
"""Micro-batches, where there is a pipeline."""


def every_layout(world: int, *, experts: bool) -> Iterator[Layout]:
    """All that `phalanx prove` chooses from; with ``experts``, those of which they are spread."""
    for count, layout in enumerate(every(world, experts=experts)):
        if (layout.ep > 1) != experts:
            continue
        share = -(-HostileLanguage.global_batch // layout.batch_ranks)
        micro = -(-share // PIPELINED) if layout.pp > 1 else None
        yield replace(layout, recompute=("none", "full")[count % 2], micro_batch=micro)


def task_for(layout: Layout) -> Task:
    """With as many heads and blocks as the layout needs, and experts if it spreads them."""
    many = layout.tp > 2 or (layout.cp_kind == "ulysses" and layout.tp * layout.cp > 2)
    layers = max(2, layout.stages)
    kind = Mixture if layout.ep > 1 else HostileLanguage
    return kind(layers=layers, heads=8 if many else 2, kv_heads=2 if many else 1)
