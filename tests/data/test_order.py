"""Order: every sample once an epoch, in an order of its own, whatever the number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx import WrongUse
from phalanx.data.order import Order, digest, leaf, permute, permute_each, share


@given(st.integers(1, 5000), st.integers(0, 2**32))
def test_it_is_a_permutation(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size), size, key)) == list(range(size))


def test_every_place_is_reached_alike() -> None:
    size, trials = 7, 3500
    hits = np.zeros((size, size))
    for key in range(trials):
        hits[np.arange(size), permute(np.arange(size), size, key)] += 1
    expected = trials / size
    assert ((hits - expected) ** 2 / expected).sum() < 100  # chi-squared, 36 degrees of freedom: 1e-7


def test_neighbours_are_not_related() -> None:
    order = permute(np.arange(100_003), 100_003, 5)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(np.arange(len(order)), order)[0, 1]) < 0.02


def test_an_epoch_has_every_sample_once_and_its_own_order() -> None:
    order = Order(size=29, global_batch=8, seed=3)
    assert order.steps_per_epoch == 4
    epochs = [np.concatenate([order.ids(step) for step in range(4 * e, 4 * e + 4)]) for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(29))
    assert not (epochs[0] == epochs[1]).all()
    assert [order.slots(step) for step in range(5)] == [8, 8, 8, 5, 8]


def test_any_step_costs_the_same_and_needs_no_memory() -> None:
    order = Order(size=10**12, global_batch=4, seed=1)
    far = order.ids(10**11)
    assert (order.ids(10**11, 1, 3) == far[1:3]).all()
    assert len(set(far.tolist())) == 4
    assert digest(far) != digest(order.ids(10**11 + 1))


@given(st.integers(1, 64), st.integers(1, 9), st.integers(1, 9))
def test_ranks_and_micro_batches_share_the_slots_exactly(slots: int, micro_batches: int, ranks: int) -> None:
    shares = [share(slots, micro_batches, ranks, rank) for rank in range(ranks)]
    assert len({len(ranges) for ranges in shares}) == 1, "ranks would run different numbers of micro-batches"
    taken = [slot for ranges in shares for start, stop in ranges for slot in range(start, stop)]
    assert sorted(taken) == list(range(slots))
    whole = share(slots, micro_batches, 1, 0)
    for index, (start, stop) in enumerate(whole):
        together = [slot for ranges in shares for slot in range(*ranges[index])]
        assert together == list(range(start, stop)), "a micro-batch over all ranks is not what one device computes"
        assert stop > start


@given(st.integers(1, 64), st.sampled_from([1, 2, 8, 32]))
def test_virtual_micro_batches_share_the_slots_exactly(slots: int, leaves: int) -> None:
    ranges = [leaf(slots, leaves, index) for index in range(leaves)]
    assert [slot for found in ranges for slot in range(*found)] == list(range(slots))
    assert max(stop - start for start, stop in ranges) - min(stop - start for start, stop in ranges) <= 1


@pytest.mark.parametrize("size", [8, 24, 29, 41, 47])
def test_what_does_not_fill_a_batch_is_dropped_or_merged(size: int) -> None:
    kept = Order(size, 8, seed=3)
    whole, rest = divmod(size, 8)
    dropped, merged = (kept.with_last_batch(how) for how in ("drop", "merge"))
    assert [order.steps_per_epoch for order in (kept, dropped, merged)] == [whole + bool(rest), whole, whole]
    assert [order.steps_in(3) for order in (kept, dropped, merged)] == [3 * (whole + bool(rest)), 3 * whole, 3 * whole]
    assert [dropped.slots(step) for step in range(2 * whole)] == [8] * 2 * whole
    assert [merged.slots(step) for step in range(2 * whole)] == 2 * [*[8] * (whole - 1), 8 + rest]
    for order, seen in ((dropped, size - rest), (merged, size)):
        epochs = [np.concatenate([order.ids(e * whole + step) for step in range(whole)]) for e in range(3)]
        for number, epoch in enumerate(epochs):
            assert len(set(epoch.tolist())) == len(epoch) == seen == order.drawn, "a sample comes twice or is lost"
            first = number * kept.steps_per_epoch
            assert (order.ids(number * whole) == kept.ids(first)[: order.slots(0)]).all() or whole == 1
        left = [set(range(size)) - set(epoch.tolist()) for epoch in epochs]
        assert not rest or order is merged or left[0] != left[1], "the same samples are left out of each epoch"
    assert (kept.with_last_batch("drop").facts() == {}) == (rest == 0), "what changes nothing is no other order"


def test_what_an_epoch_leaves_out_is_told() -> None:
    assert Order(41, 8).describe() == "41 samples an epoch"
    assert Order(40, 8, last_batch="drop").describe() == "40 samples an epoch"
    assert "1 of them is left out, others each time (last_batch=drop)" in Order(41, 8, last_batch="drop").describe()
    assert "its last step has 11 (last_batch=merge)" in Order(43, 8, last_batch="merge").describe()


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 39))
def test_a_merged_step_has_more_micro_batches_and_none_larger(batch: int, usual: int, rest: int) -> None:
    usual, order = min(usual, batch), Order(batch + rest % batch, batch, last_batch="merge")
    slots = order.slots(0)
    largest = max(stop - start for start, stop in share(batch, usual, 1, 0))
    widths = [stop - start for start, stop in share(slots, order.micro_batches(slots, usual), 1, 0)]
    assert sum(widths) == slots
    assert max(widths) <= largest
    assert Order(batch, batch).micro_batches(batch, usual) == usual


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 2**63)), min_size=1, max_size=20))
def test_permutations_of_many_sizes_at_once(each: list[tuple[int, int]]) -> None:
    sizes = np.concatenate([np.full(size, size) for size, _ in each])
    keys = np.concatenate([np.full(size, key, dtype=np.uint64) for size, key in each])
    found = permute_each(np.concatenate([np.arange(size) for size, _ in each]), sizes, keys)
    for number, (size, _) in enumerate(each):
        first = sum(size for size, _ in each[:number])
        assert sorted(found[first : first + size]) == list(range(size))


def test_data_smaller_than_a_batch_is_refused() -> None:
    with pytest.raises(WrongUse, match="7 samples, fewer than one batch of 8"):
        Order(7, 8)
    with pytest.raises(WrongUse, match="empty"):
        Order(0, 8)
    assert Order(7, 8, shuffle=False).ids(0).tolist() == list(range(7))
