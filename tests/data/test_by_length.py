"""Steps by length: every sample once an epoch, no step beyond its tokens, from any step, shared evenly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import phalanx
from phalanx import WrongUse
from phalanx.data import ByLength
from phalanx.data.by_length import SORTED_STEPS, LengthOrder
from phalanx.data.order import parts, share
from phalanx.data.planned import order_of
from tests.ranks import Ranks
from tests.tasks import Digits

LENGTHS = np.random.default_rng(3).integers(1, 60, 1000)


def an_order(grouped: bool = True, batch_tokens: int = 0, seed: int = 5, size: int = 1000) -> LengthOrder:
    return LengthOrder(size, 8, seed, lengths=LENGTHS[:size], grouped=grouped, batch_tokens=batch_tokens)


@pytest.mark.parametrize(("grouped", "tokens"), [(True, 0), (True, 300), (False, 300), (True, 59)])
def test_an_epoch_has_every_sample_once_in_an_order_of_its_own(grouped: bool, tokens: int) -> None:
    order = an_order(grouped, tokens)
    found: dict[int, list[int]] = {}
    step = 0
    while (epoch := order.epoch(step)) < 3:
        ids = order.ids(step)
        assert len(ids) == order.slots(step) > 0
        assert np.array_equal(order.tokens(ids), LENGTHS[ids])
        assert LENGTHS[ids].sum() <= tokens if tokens else len(ids) <= 8
        found.setdefault(epoch, []).extend(ids.tolist())
        step += 1
    assert step == order.steps_in(3)
    assert all(sorted(ids) == list(range(1000)) for ids in found.values())
    assert len({tuple(ids) for ids in found.values()}) == 3


def test_any_step_is_found_at_once_and_again() -> None:
    order = an_order(batch_tokens=300)
    far = {step: an_order(batch_tokens=300).ids(step).tolist() for step in (400, 7, 231)}
    for step in (7, 231, 400):
        assert order.ids(step).tolist() == far[step]
        assert order.ids(step, 1, 3).tolist() == far[step][1:3]
    assert an_order(batch_tokens=300, seed=6).ids(7).tolist() != far[7]


def test_samples_of_a_step_are_of_about_one_length() -> None:
    def padded(order: LengthOrder) -> float:
        steps = [order.tokens(order.ids(step)) for step in range(order.steps_in(1))]
        return sum(len(step) * int(step.max()) for step in steps) / LENGTHS.sum()

    assert padded(an_order(batch_tokens=300)) < 1.06 < 1.4 < padded(an_order(grouped=False, batch_tokens=300))
    assert padded(an_order()) < 1.06
    assert SORTED_STEPS * 8 < 1000, "or all of it would be sorted together"


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("size", [995, 405, 13])
def test_the_last_batch_of_an_epoch_is_dropped_or_merged(grouped: bool, size: int) -> None:
    whole, rest = divmod(size, 8)
    for how, steps, left in (("drop", whole, rest), ("merge", whole, 0)):
        order = an_order(grouped, size=size).with_last_batch(how)
        assert order.steps_in(2) == 2 * steps
        epochs = [[order.ids(epoch * steps + step) for step in range(steps)] for epoch in range(3)]
        for epoch in epochs:
            sizes = [8] * (whole - 1) + [8 + rest] if how == "merge" else [8] * whole
            assert sorted(map(len, epoch)) == sizes
            assert len(set(np.concatenate(epoch).tolist())) == size - left
        lost = [frozenset(range(size)) - frozenset(np.concatenate(epoch).tolist()) for epoch in epochs]
        assert len(set(lost)) == (3 if left else 1), "the same samples are left out of each epoch"
        found = order_of(order.facts(), size, 8, 5, lambda: an_order(grouped, size=size))
        assert found == order


def test_the_longest_are_left_out_no_more_than_others() -> None:
    """Of one part of sorted samples, the last batch would be that of the longest."""
    order, left = an_order(size=397).with_last_batch("drop"), np.zeros(397)
    for epoch in range(200):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        left[list(set(range(397)) - set(np.concatenate([order.ids(step) for step in steps]).tolist()))] += 1
    longest = np.argsort(LENGTHS[:397])[-40:]
    assert left[longest].mean() == pytest.approx(left.mean(), rel=0.3)
    assert left.max() < 15


def test_steps_of_tokens_have_no_last_batch() -> None:
    with pytest.raises(WrongUse, match="last_batch=drop is not for steps of batch_tokens=300"):
        an_order(batch_tokens=300).with_last_batch("drop")


def test_a_sample_beyond_the_tokens_is_refused() -> None:
    with pytest.raises(WrongUse, match="batch_tokens=58 is less than the longest sample has, 59 tokens"):
        an_order(batch_tokens=58)
    with pytest.raises(WrongUse, match="fewer than one batch of 8"):
        an_order(size=7)
    assert an_order(size=7, batch_tokens=100).steps_per_epoch >= 1
    with pytest.raises(WrongUse, match="there are 3 lengths for 2 samples"):
        ByLength([1, 2], [1, 2, 3])
    with pytest.raises(WrongUse, match="batch_tokens=-1"):
        ByLength([1, 2], [1, 2], batch_tokens=-1)


def test_it_is_known_again_by_its_facts() -> None:
    data = ByLength(list(range(1000)), LENGTHS, batch_tokens=300)
    order = data.training_order(8, 5)
    assert order_of(order.facts(), 1000, 8, 5, lambda: data.training_order(3, 0)) == order
    other = ByLength(list(range(1000)), LENGTHS[::-1], batch_tokens=300)
    assert order_of(order.facts(), 1000, 8, 5, lambda: other.training_order(3, 0)) is None


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 5), st.integers(1, 6))
def test_tokens_are_shared_evenly_and_no_slot_is_lost(lengths: list[int], micro_batches: int, ranks: int) -> None:
    tokens = np.array(lengths)
    shares = [share(len(tokens), micro_batches, ranks, rank, tokens) for rank in range(ranks)]
    taken = [slot for ranges in shares for start, stop in ranges for slot in range(start, stop)]
    assert sorted(taken) == list(range(len(tokens)))
    whole = share(len(tokens), micro_batches, 1, 0, tokens)
    for index, (start, stop) in enumerate(whole):
        assert stop > start
        assert [slot for ranges in shares for slot in range(*ranges[index])] == list(range(start, stop))
    if len(tokens) >= 2 * ranks and min(lengths) > 0:
        each = [int(tokens[start:stop].sum()) for start, stop in parts(0, len(tokens), ranks, tokens)]
        assert all(each), "a rank has nothing to do"
        assert max(each) <= tokens.sum() / ranks + 2 * max(lengths) * ranks


class Ragged(Digits):
    """Digits whose samples are said to have lengths."""

    def data(self) -> ByLength:
        return ByLength(self._points(40, 0), LENGTHS[:40], batch_tokens=200)


def trained(layout: str, start: int = 0) -> tuple[list[tuple[str, int]], dict[str, torch.Tensor]]:
    with phalanx.Engine(Ragged(epochs=2, precision="float64"), layout, device="cpu") as engine:
        engine.step_number = start
        found = [engine.step(batch) for batch in engine.batches()]
        assert engine.task.steps == engine.order.steps_in(2)
        return [(metrics.samples, metrics.slots) for metrics in found], engine.whole_weights()


@pytest.mark.parametrize("layout", ["dp=3", "dp=2,micro_batch=2", "fsdp=2"])
def test_steps_are_the_same_on_any_number_of_ranks(layout: str, ranks: Ranks) -> None:
    samples, weights = ranks(1, trained, "dp=1")[0]
    assert len({slots for _, slots in samples}) > 1, "every step has the same number of samples"
    assert ranks(1, trained, "dp=1", 3)[0][0] == samples[3:]
    for found, other in ranks(phalanx.Layout.parse(layout).world, trained, layout):
        assert found == samples
        assert all(torch.allclose(weight, weights[name], rtol=0, atol=1e-12) for name, weight in other.items())
