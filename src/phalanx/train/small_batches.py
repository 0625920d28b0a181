"""Micro-batches of one sample: a batch-norm may find no variance in them, which is said before the first step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.words import many

if TYPE_CHECKING:
    from phalanx.data.loader import Loader
    from phalanx.data.order import Order

LOOKED_AT = 1000
"""So many steps of an epoch are looked at where samples of different lengths make micro-batches of different sizes."""


def single_sample(loader: Loader, steps: int) -> str:
    """Which micro-batch of so many steps has one sample on all ranks together, and what to do; empty: none has."""
    order = loader.order
    epoch = min(order.steps_per_epoch, steps)
    if not epoch or loader.leaves:  # exact sums are not offered with batch-norm
        return ""
    by_tokens = order.tokens(order.ids(0)) is not None
    for step in range(min(epoch, LOOKED_AT)) if by_tokens else dict.fromkeys((0, epoch - 1)):
        widths = loader.widths(step)
        if 1 not in widths:
            continue
        if step == order.steps_per_epoch - 1 and order.last_batch != "drop" and order.rest:
            return f"{last_step(order, order.slots(step), len(widths))}. {instead(order)}"
        return f"a step has {many(len(widths), 'micro-batch', 'micro-batches')}, one of them of 1 sample. {LARGER}"
    return ""


LARGER = "Set a larger micro_batch in the layout, or a larger global_batch."


def last_step(order: Order, slots: int, micro_batches: int = 1) -> str:
    """What the last step of an epoch has, and why."""
    cut = f" in {micro_batches} micro-batches, one of them of 1" if micro_batches > 1 else ""
    size = f"{order.size:,} samples in batches of {order.global_batch}"
    return f"the last step of an epoch has {many(slots, 'sample')}{cut} ({size})"


def instead(order: Order) -> str:
    """How to have no such step."""
    if order.last_batch == "merge":
        return "Leave these samples out: last_batch=drop"
    return (
        "Leave these samples out of each epoch, others each time: last_batch=drop; or add them to the step before: "
        "last_batch=merge"
    )
