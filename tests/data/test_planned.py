"""Orders as a run's events tell of them are the orders that the run had."""

from __future__ import annotations

import json

import pytest

from phalanx.data.mixture import MixtureOrder
from phalanx.data.order import Order
from phalanx.data.planned import order_of
from phalanx.data.streaming import BlockOrder

ORDERS = [
    Order(20, 4, 1),
    MixtureOrder(20, 4, 1, sizes=(15, 5), curriculum=((0, (0.3, 0.7)), (3, (1.0, 0.0)))),
    BlockOrder(20, 4, 1, block=3, window=2),
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_an_order_reads_back(order: Order) -> None:
    found = order_of(json.loads(json.dumps(order.facts())), 20, 4, 1, list)
    assert found == order
    assert [found.ids(step).tolist() for step in range(9)] == [order.ids(step).tolist() for step in range(9)]
