"""The order of shards: every sample once an epoch, from any step, each shard read forwards."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.data.planned import order_of
from phalanx.data.shard_order import ShardOrder


def an_order(sizes: tuple[int, ...], chunk: int = 3, window: int = 2, seed: int = 5) -> ShardOrder:
    return ShardOrder(sum(sizes), 4, seed, sizes=sizes, chunk=chunk, window=window)


@pytest.mark.parametrize("sizes", [(7,), (5, 1, 9, 3, 2), (0, 4, 0, 4), (3, 3, 3, 3)])
def test_an_epoch_has_every_sample_once_in_an_order_of_its_own(sizes: tuple[int, ...]) -> None:
    order = an_order(sizes)
    epochs = [
        np.concatenate([order.ids(epoch * order.steps_per_epoch + step) for step in range(order.steps_per_epoch)])
        for epoch in range(2)
    ]
    for ids in epochs:
        assert sorted(ids.tolist()) == list(range(sum(sizes)))
    assert epochs[0].tolist() != epochs[1].tolist()
    assert an_order(sizes, seed=6).ids(0).tolist() != order.ids(0).tolist()


def test_slots_and_steps_are_asked_for_in_any_order() -> None:
    steps = {step: an_order((5, 1, 9, 3, 2)).ids(step) for step in (9, 3, 0, 7)}
    order = an_order((5, 1, 9, 3, 2))
    for step, ids in steps.items():
        assert np.array_equal(order.ids(step), ids)
        assert np.array_equal(order.ids(step, 1, 3), ids[1:3])


def test_shards_are_read_forwards_a_chunk_at_a_time() -> None:
    sizes = (20, 31, 8, 27)
    order = an_order(sizes, chunk=5, window=2)
    before = np.concatenate([[0], np.cumsum(sizes)])
    newest = [0] * len(sizes)
    for step in range(order.steps_per_epoch):
        for index in order.ids(step).tolist():
            shard = int(np.searchsorted(before, index, side="right")) - 1
            chunk = (index - before[shard]) // 5
            assert chunk >= newest[shard], "a shard would have to be read again"
            newest[shard] = chunk


def test_it_is_made_again_from_its_facts() -> None:
    order = an_order((5, 1, 9))
    assert order_of(order.facts(), 15, 4, 5, list) == order
