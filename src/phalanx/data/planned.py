"""The order that a task's samples are trained on in, and that a run was planned in, as its events tell of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from phalanx.data.columns import column_of
from phalanx.data.kinds import length
from phalanx.data.mixture import MixtureOrder
from phalanx.data.order import Order
from phalanx.data.shard_order import ShardOrder
from phalanx.data.streaming import BlockOrder
from phalanx.data.weighted import balanced, weighted
from phalanx.errors import WrongUse
from phalanx.task import Task


def training_order(task: Task, data: Any) -> Order:
    """Which samples a task trains on in which step: in an order of its data's own, if that has a ``training_order``."""
    size, own = length(data, "data", task), getattr(data, "training_order", None)
    order = Order(size, task.global_batch, task.seed) if own is None else own(task.global_batch, task.seed)
    if task.last_batch != "keep":
        order = order.with_last_batch(task.last_batch)
    return _drawn(task, data, order)


def _drawn(task: Task, data: Any, order: Order) -> Order:
    """The order, or draws by weights or by classes in its place."""
    weights = task.sample_weights(data)
    column = task.balance if isinstance(task.balance, str) else ""  # a task may have a number of that name
    if weights is None and not column:
        return order
    name = f"{type(task).__name__}.sample_weights()"
    asked = f"balance={column}" if column else name
    if weights is not None and column:
        raise WrongUse(f"{name} and balance={column} both say how often samples are drawn. Leave one of them out.")
    if type(order) is not Order:
        raise WrongUse(
            f"{asked} is not for a {type(data).__name__}, which has an order of its own ({type(order).__name__}). "
            "Leave one of the two out; a Mixture has weights by source."
        )
    if weights is not None:
        return weighted(order, weights, name)
    return balanced(order, column_of(data, column), column)


def order_of(
    facts: Mapping[str, Any] | None, size: int, global_batch: int, seed: int, now: Callable[[], Order]
) -> Order | None:
    """The order of so many samples, by its `Order.facts`.

    ``now``: the task's order as it is now, asked for where facts have a hash of what it follows from; None if that is
    something else now.
    """
    facts = dict(facts or {})
    last_batch = facts.get("last_batch", "keep")
    if not facts.keys() - {"last_batch"}:
        return Order(size, global_batch, seed, last_batch=last_batch)
    if "block" in facts:
        block, window = int(facts["block"]), int(facts["window"])
        return BlockOrder(size, global_batch, seed, last_batch=last_batch, block=block, window=window)
    if "shards" in facts:
        sizes, chunk, window = tuple(facts["shards"]), int(facts["chunk"]), int(facts["window"])
        return ShardOrder(
            size, global_batch, seed, last_batch=last_batch, sizes=sizes, chunk=chunk, window=window
        )  # fmt: skip
    if "curriculum" in facts:
        curriculum = tuple((int(step), tuple(weights)) for step, weights in facts["curriculum"])
        return MixtureOrder(size, global_batch, seed, sizes=tuple(facts["sizes"]), curriculum=curriculum)
    own = replace(now(), global_batch=global_batch, seed=seed, last_batch=last_batch)
    return own if own.size == size and own.facts() == facts else None
