"""Orders as a run's events tell of them are the orders that the run had."""

from __future__ import annotations

import json

import numpy as np
import pytest

from phalanx.data.mixture import MixtureOrder
from phalanx.data.order import Order
from phalanx.data.planned import order_of
from phalanx.data.shard_order import ShardOrder
from phalanx.data.streaming import BlockOrder

ORDERS = [
    Order(20, 4, 1),
    MixtureOrder(20, 4, 1, sizes=(15, 5), curriculum=((0, (0.3, 0.7)), (3, (1.0, 0.0)))),
    BlockOrder(20, 4, 1, block=3, window=2),
    Order(23, 4, 1, last_batch="drop"),
    BlockOrder(23, 4, 1, last_batch="merge", block=3, window=2),
    ShardOrder(23, 4, 1, last_batch="drop", sizes=(9, 3, 11), chunk=3, window=2),
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_an_order_reads_back(order: Order) -> None:
    found = order_of(json.loads(json.dumps(order.facts())), order.size, 4, 1, lambda: order)
    assert found == order
    assert [found.ids(step).tolist() for step in range(9)] == [order.ids(step).tolist() for step in range(9)]


@pytest.mark.parametrize("order", ORDERS[3:], ids=lambda order: type(order).__name__)
def test_what_does_not_fill_a_batch_is_dropped_or_merged_in_any_order(order: Order) -> None:
    assert order.steps_per_epoch == 5
    for epoch in range(3):
        ids = [order.ids(5 * epoch + step) for step in range(5)]
        assert [len(own) for own in ids] == ([4] * 5 if order.last_batch == "drop" else [4, 4, 4, 4, 7])
        assert len(set(np.concatenate(ids).tolist())) == order.drawn
