"""Which layouts to prove: those a user names, or enough of all that a number of ranks allows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Literal

from phalanx.layout import CHOICES, Layout

MICRO_BATCHES = 3
"""Not a power of two, so that a factor that comes from them is told from one that comes from ranks."""

One = Literal["never", "in a pipeline", "always"]


def factorizations(world: int, axes: int) -> Iterator[tuple[int, ...]]:
    """All ways to write ``world`` as a product of so many degrees."""
    degrees = [n for n in range(1, world + 1) if world % n == 0]
    for found in itertools.product(degrees, repeat=axes - 1):
        rest, odd = divmod(world, math.prod(found))
        if rest and not odd:
            yield (*found, rest)


def every(world: int, *, experts: bool = False, blocks: bool = True) -> Iterator[Layout]:
    """All factorizations over dp, fsdp, tp, cp and pp, with all ZeRO stages, schedules and kinds of cp.

    With ``experts``, all degrees of ep. Blocks, where there are any, are recomputed in every fourth layout.
    """
    count = 0
    for dp, fsdp, tp, cp, pp in factorizations(world, 5):
        shards = fsdp * cp
        for zero, schedule, kind, ep in itertools.product(
            (3, 2, 1) if shards > 1 else (3,),
            sorted(CHOICES["schedule"]) if pp > 1 else (Layout.schedule,),
            CHOICES["cp_kind"] if cp > 1 else (Layout.cp_kind,),
            [n for n in range(1, shards + 1) if shards % n == 0] if experts else [1],
        ):
            count += 1
            yield Layout(
                dp=dp, fsdp=fsdp, tp=tp, cp=cp, pp=pp, ep=ep, zero=zero, schedule=schedule, cp_kind=kind,
                recompute="full" if blocks and count % 4 == 0 else "none",
            )  # fmt: skip


def covering(layouts: Sequence[Layout], done: Sequence[Layout] = ()) -> list[Layout]:
    """Some of them: every division of the ranks between axes, and every two settings that meet in any of them.

    What those that are ``done`` have need not be there again.
    """

    def traits(layout: Layout) -> set[object]:
        plain = Layout()
        set_to = [
            (f.name, getattr(layout, f.name)) for f in fields(layout) if f.name not in ("recompute", "micro_batch")
        ]
        own = [(name, value) for name, value in set_to if value != getattr(plain, name)]
        degrees = layout.dp, layout.fsdp, layout.tp, layout.cp, layout.pp
        return {degrees, *itertools.combinations(own, 1), *itertools.combinations(own, 2)}

    known = {layout: traits(layout) for layout in layouts}
    left: set[object] = set().union(*known.values()).difference(*map(traits, done))
    chosen = []
    while left:
        chosen.append(max(known, key=lambda layout: len(known[layout] & left)))
        left -= known[chosen[-1]]
    return chosen


def as_proven(layout: Layout, batch: int, one: One = "never") -> Layout:
    """A layout with several micro-batches of a proof's batch, or as many samples in one as it says itself.

    ``one``: where there can be one micro-batch alone, since the loss needs a step's samples at the same time.
    """
    if layout.exact:
        return replace(layout, exact=min(layout.exact, 1 << (batch.bit_length() - 1)))
    share = math.ceil(batch / layout.batch_ranks)
    if layout.micro_batch is not None:
        return replace(layout, micro_batch=min(layout.micro_batch, share))
    if one == "always" or (one == "in a pipeline" and layout.pp > 1):
        return layout
    each = math.ceil(math.ceil(batch / layout.batch_ranks) / MICRO_BATCHES)
    return replace(layout, micro_batch=max(1, each if layout.batch_ranks < 8 else each + 1))
