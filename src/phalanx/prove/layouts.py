"""Which layouts to prove: those a user names, or enough of all that a number of ranks allows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

from phalanx.comm import AUTO, EXACT
from phalanx.comm_methods import CANDIDATES
from phalanx.layout import CHOICES, Layout

MICRO_BATCHES = 3
"""Not a power of two, so that a factor that comes from them is told from one that comes from ranks."""


def factorizations(world: int, axes: int) -> Iterator[tuple[int, ...]]:
    """All ways to write ``world`` as a product of so many degrees."""
    degrees = [n for n in range(1, world + 1) if world % n == 0]
    for found in itertools.product(degrees, repeat=axes - 1):
        rest, odd = divmod(world, math.prod(found))
        if rest and not odd:
            yield (*found, rest)


def every(world: int, *, experts: bool = False, blocks: bool = True) -> Iterator[Layout]:
    """All factorizations over dp, fsdp, tp, cp and pp, with all ZeRO stages, schedules and kinds of cp.

    With ``experts``, all degrees of ep. Blocks, where there are any, are recomputed in every fourth layout that is not
    the one that degrees alone mean.
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
            found = Layout(
                dp=dp, fsdp=fsdp, tp=tp, cp=cp, pp=pp, ep=ep, zero=zero, schedule=schedule, cp_kind=kind
            )  # fmt: skip
            recomputed = blocks and count % 4 == 0 and not _degrees_alone(found)
            yield replace(found, recompute="full") if recomputed else found


def each_choice(layout: Layout) -> list[Layout]:
    """Where methods are chosen in a run, one layout for each that may be, and itself, in which they change.

    Over ``fsdp`` each is a part of the last: by themselves they would gather weights in few bits, too.
    """
    if layout.comm != AUTO or not layout.coded_axis:
        return [layout]
    methods = [method.name for method in CANDIDATES if layout.coded_axis == "dp" or method.name == EXACT]
    return [*(replace(layout, comm=name) for name in methods), layout]


def covering(layouts: Sequence[Layout], done: Sequence[Layout] = ()) -> list[Layout]:
    """Some of them: what each division of the ranks means by itself, and every two settings that meet in any of them.

    What those that are ``done`` have need not be there again.
    """
    known = {layout: _traits(layout) for layout in layouts}
    left: set[object] = set().union(*known.values()).difference(*map(_traits, done))
    chosen = []
    for layout in filter(_degrees_alone, layouts):
        if known[layout] & left:
            chosen.append(layout)
            left -= known[layout]
    while left:
        chosen.append(max(known, key=lambda layout: len(known[layout] & left)))
        left -= known[chosen[-1]]
    return chosen


def _traits(layout: Layout) -> set[object]:
    """What a layout stands for: its settings that have an effect, defaults among them, and every two of these."""
    plain = Layout()
    effective = {"zero": layout.fsdp * layout.cp > 1, "schedule": layout.pp > 1, "cp_kind": layout.cp > 1}
    own = [
        (f.name, getattr(layout, f.name))
        for f in fields(layout)
        if f.name not in ("recompute", "micro_batch")
        if effective.get(f.name, getattr(layout, f.name) != getattr(plain, f.name))
    ]
    degrees = layout.dp, layout.fsdp, layout.tp, layout.cp, layout.pp
    alone = [("by default", degrees)] if _degrees_alone(layout) else []
    return {degrees, *alone, *itertools.combinations(own, 1), *itertools.combinations(own, 2)}


def _degrees_alone(layout: Layout) -> bool:
    """Whether it is what one gets who gives degrees and nothing else."""
    return layout == Layout(dp=layout.dp, fsdp=layout.fsdp, tp=layout.tp, cp=layout.cp, pp=layout.pp)


def as_proven(layout: Layout, batch: int, at_once: bool = False) -> Layout:
    """A layout with several micro-batches of a proof's batch, or as many samples in one as it says itself.

    ``at_once``: the loss needs all samples of a step at the same time, so a pipeline has one micro-batch.
    """
    if layout.local is not None:
        layout = replace(layout, comm=str(layout.local.shortened()))
    if layout.exact:
        return replace(layout, exact=min(layout.exact, 1 << (batch.bit_length() - 1)))
    share = math.ceil(batch / layout.batch_ranks)
    if layout.micro_batch is not None:
        return replace(layout, micro_batch=min(layout.micro_batch, share))
    if at_once and layout.pp > 1:
        return layout
    each = math.ceil(math.ceil(batch / layout.batch_ranks) / MICRO_BATCHES)
    return replace(layout, micro_batch=max(1, each if layout.batch_ranks < 8 else each + 1))
