"""The order that samples of a run were planned in, from what its events or its checkpoint tell of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from phalanx.data.mixture import MixtureOrder
from phalanx.data.order import Order
from phalanx.data.shard_order import ShardOrder
from phalanx.data.streaming import BlockOrder


def order_of(
    facts: Mapping[str, Any] | None, size: int, global_batch: int, seed: int, data: Callable[[], Any]
) -> Order | None:
    """The order of so many samples, by its `Order.facts`.

    ``data``: asked for the samples' lengths, which facts have a hash of; None if they are others now.
    """
    if not facts:
        return Order(size, global_batch, seed)
    if "block" in facts:
        return BlockOrder(size, global_batch, seed, block=int(facts["block"]), window=int(facts["window"]))
    if "lengths" in facts:
        own: Order = Order.of(data(), size, global_batch, seed)
        return own if own.facts() == facts else None
    if "shards" in facts:
        sizes, chunk, window = tuple(facts["shards"]), int(facts["chunk"]), int(facts["window"])
        return ShardOrder(size, global_batch, seed, sizes=sizes, chunk=chunk, window=window)
    curriculum = tuple((int(step), tuple(weights)) for step, weights in facts["curriculum"])
    return MixtureOrder(size, global_batch, seed, sizes=tuple(facts["sizes"]), curriculum=curriculum)
