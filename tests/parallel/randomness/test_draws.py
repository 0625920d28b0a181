"""Randomness in a model: by sample and place, not by rank, micro-batch or order of computing."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx import WrongUse
from phalanx.parallel.randomness.answers import Answers, check_unmoved, generator_state
from phalanx.parallel.randomness.draws import Moment, RandomKeys, Randomness

CPU = torch.device("cpu")


def randomness(slots: list[int], step: int = 0, seed: int = 0) -> Randomness:
    made = Randomness(seed, Moment(step, np.array(slots)), CPU)
    made.answers = Answers(made)
    return made


DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "module": nn.Dropout(0.5),
    "feature dropout": lambda x: F.dropout1d(x, 0.5),
    "rand": lambda x: torch.rand(x.shape),
    "randn": lambda x: torch.randn(*x.shape),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.5),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "uniform_": lambda x: torch.empty_like(x).uniform_(),
    "randint": lambda x: torch.randint(0, 1000, x.shape),
    "gumbel": lambda x: F.gumbel_softmax(x),
    "per sample": lambda x: x * torch.rand(len(x), 1, 1),
    "folded": lambda x: F.dropout(x.flatten(0, 1), 0.5).view(x.shape),
    "time first": lambda x: F.dropout(x.transpose(0, 1), 0.5).transpose(0, 1),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5, is_causal=True),
}


def run(function: object, slots: list[int], step: int = 0) -> Tensor:
    x = torch.stack([torch.full((7, 6), float(slot + 1)) + torch.arange(6) for slot in slots])
    keyed = randomness(slots, step)
    before = generator_state(CPU)
    with keyed.scope("block"):
        out = function(x)
    check_unmoved(before, CPU)
    return out


@pytest.mark.parametrize("name", DRAWS)
def test_a_sample_draws_the_same_in_any_micro_batch(name: str) -> None:
    whole = run(DRAWS[name], [0, 1, 2, 3, 4])
    parts = torch.cat([run(DRAWS[name], [0, 1]), run(DRAWS[name], [2, 3, 4])])
    assert torch.equal(whole, parts), "the draw depends on how the batch is cut"
    assert not torch.equal(whole, run(DRAWS[name], [0, 1, 2, 3, 4], step=1)), "every step draws the same"


def test_blocks_and_calls_draw_differently_and_recomputing_the_same() -> None:
    keyed = randomness([0, 1])
    x = torch.ones(2, 100)
    with keyed.scope("task"):
        with keyed.scope("block 0"):
            first, second = F.dropout(x), F.dropout(x)
        with keyed.scope("block 1"):
            other = F.dropout(x)
        outer = F.dropout(x)
    with keyed.scope("block 0"):
        again = F.dropout(x)
    assert torch.equal(first, again)
    drawn = [first, second, other, outer]
    assert not any(torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


def test_what_has_no_batch_is_shared() -> None:
    shared = [run(lambda x: torch.rand(3, 4), slots) for slots in ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9])]
    assert torch.equal(*shared)


def test_padding_a_sample_longer_changes_nothing() -> None:
    keyed = randomness([4, 9])
    with keyed.scope("block"):
        short = F.dropout(torch.ones(2, 3, 5), 0.5)
    with keyed.scope("block"):
        long = F.dropout(torch.ones(2, 8, 5), 0.5)
    assert torch.equal(short, long[:, :3])


@pytest.mark.parametrize("inner", [(7, 6), (2, 7, 7), (6, 3)])
def test_sequences_of_a_sample_draw_the_same_in_any_micro_batch(inner: tuple[int, ...]) -> None:
    """Three a sample, also where heads or positions are as many as samples."""
    model = nn.Module()
    model.sequences = 3  # type: ignore[assignment]

    def drawn(*slots: int) -> Tensor:
        keyed = randomness(list(slots))
        keyed.model = model
        with keyed.scope("block"):
            return F.dropout(torch.ones(3 * len(slots), *inner), 0.5)

    whole = drawn(*range(6))
    assert torch.equal(whole, torch.cat([drawn(0, 1), drawn(2, 3, 4, 5)]))
    assert not any(torch.equal(whole[a], whole[b]) for a in range(18) for b in range(a))


def test_dropout_is_off_where_torch_has_it_off() -> None:
    x = torch.ones(2, 3)
    keyed = randomness([0, 1])
    with keyed.scope("block"):
        assert torch.equal(F.dropout(x, 0.5, training=False), x)
        assert torch.equal(F.dropout(x, 0.0), x)
        assert not F.dropout(x, 1.0).any()
        with pytest.raises(ValueError, match="between 0 and 1"):
            F.dropout(x, 1.5)
        y = x.clone()
        assert F.dropout(y, 0.5, inplace=True) is y


def test_attention_without_dropout_is_torchs_own() -> None:
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    mask = torch.rand(2, 1, 5, 5) > 0.3
    mask[..., 0] = True
    keyed = randomness([0, 1])
    with keyed.scope("block"):
        found = F.scaled_dot_product_attention(q, k, k, attn_mask=mask, dropout_p=1e-9, enable_gqa=True)
    assert torch.allclose(found, F.scaled_dot_product_attention(q, k, k, attn_mask=mask, enable_gqa=True), atol=1e-6)


def test_torchs_multi_head_attention_is_keyed_too() -> None:
    layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.5, batch_first=True)
    whole = run(layer, [0, 1, 2, 3])
    assert torch.allclose(whole, torch.cat([run(layer, [0]), run(layer, [1, 2, 3])]), atol=1e-6)
    assert F.dropout.__module__ == "torch.nn.functional", "the patch was left on"


def test_keys_of_all_blocks_are_those_of_each() -> None:
    x = torch.ones(3, 8)
    for slots, step in (([3, 1, 4], 0), ([2, 0, 5], 0), ([3, 1, 4], 1)):
        alone, together = randomness(slots), randomness(slots)
        together.expect(["one", "other"])
        for name in ("other", "one", "third"):
            found = []
            for keyed in (alone, together):
                keyed.moment.step = step
                with keyed.scope(name):
                    found.append((F.dropout(x, 0.5), torch.rand(1)))
            assert torch.equal(found[0][0], found[1][0])
            assert torch.equal(found[0][1], found[1][1])


def test_keys_are_made_once_a_micro_batch() -> None:
    keyed = randomness([0, 1, 2])
    keyed.expect(["one", "other"])
    places = []
    for name in ("one", "other", "one"):
        with keyed.scope(name):
            rows, shared = keyed.keys()
            places.append((rows.untyped_storage().data_ptr(), shared.untyped_storage().data_ptr()))
    assert places[0] == places[1] == places[2]


def test_a_draw_that_escapes_is_refused() -> None:
    before = generator_state(CPU)
    torch.randperm(5)
    with pytest.raises(WrongUse, match="depend on how the job is spread"):
        check_unmoved(before, CPU)


def test_a_generator_of_ones_own_is_left_alone() -> None:
    keyed = randomness([0])
    with keyed.scope("block"):
        first = torch.rand(3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(first, torch.rand(3, generator=torch.Generator().manual_seed(1)))


def test_a_draw_like_a_weight_is_the_same_for_all_samples() -> None:
    weight = nn.Parameter(torch.ones(8, 6))
    masks = [run(lambda x: F.dropout(weight, 0.5), slots) for slots in ([0, 1, 2, 3, 4, 5, 6, 7], [3], [1, 2])]
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])


def test_time_may_be_a_multiple_of_the_batch() -> None:
    def time_first(x: Tensor) -> Tensor:
        return F.dropout(x[:, :6].transpose(0, 1), 0.5).transpose(0, 1)

    whole = run(time_first, [0, 1, 2])
    assert torch.equal(whole, torch.cat([run(time_first, [0]), run(time_first, [1, 2])]))


def _patches(x: Tensor) -> Tensor:
    """What MobileViT makes of a picture: rows of three patches, four for each sample."""
    return F.dropout(x.flatten(2).unflatten(2, (3, 4)).permute(0, 3, 2, 1).flatten(0, 1), 0.5)


FOLDED = {
    "patches": (_patches, (5, 4, 3)),
    "heads, as many positions as samples": (lambda x: F.dropout(torch.ones(2 * len(x), 3, 3), 0.5), (3, 5)),
    "windows, as many heads as samples": (lambda x: F.dropout(torch.ones(2 * len(x), 3, 4, 4), 0.5), (8, 5)),
    "time first inside": (lambda x: F.dropout(x.transpose(0, 1), 0.5).transpose(0, 1), (6, 5)),
}


@pytest.mark.parametrize("name", FOLDED)
def test_a_folded_draw_is_told_by_the_blocks_stream(name: str) -> None:
    """Also where its second dim is as long as there are samples: here with three of them."""
    function, stream = FOLDED[name]

    def drawn(*slots: int) -> Tensor:
        keyed = randomness(list(slots))
        with keyed.scope("task"):
            return RandomKeys("block", keyed)(function, torch.ones(len(slots), *stream)).reshape(len(slots), -1)

    whole = drawn(0, 1, 2, 3, 4)
    assert torch.equal(whole, torch.cat([drawn(0, 1, 2), drawn(3, 4)]))
    assert torch.equal(whole, torch.cat([drawn(0), drawn(1), drawn(2, 3, 4)]))


def test_a_stream_with_the_batch_second_draws_by_it() -> None:
    def drawn(*slots: int) -> Tensor:
        keyed = randomness(list(slots))
        with keyed.scope("task"):
            return RandomKeys("block", keyed)(lambda x: F.dropout(x, 0.5), torch.ones(6, len(slots), 5))

    assert torch.equal(drawn(0, 1, 2, 3, 4), torch.cat([drawn(0, 1, 2), drawn(3, 4)], 1))


def test_what_is_computed_again_is_folded_as_before() -> None:
    keyed, again = randomness([0, 1, 2]), []

    def block(x: Tensor) -> Tensor:
        again.append(keyed.replayed())
        return _patches(x)

    with keyed.scope("task"):
        first = RandomKeys("block", keyed)(block, torch.ones(3, 5, 4, 3))
    with again.pop():
        assert torch.equal(_patches(torch.ones(3, 5, 4, 3)), first)


def test_one_number_for_all_is_shared_at_any_batch() -> None:
    assert torch.equal(run(lambda x: torch.rand(1), [4]), run(lambda x: torch.rand(1), [1, 2, 3]))
    assert torch.equal(run(lambda x: torch.rand([]), [4]), run(lambda x: torch.rand([]), [1, 2, 3]))


def test_a_block_that_runs_twice_draws_anew_and_recomputes_the_same() -> None:
    keyed = randomness([0, 1])
    again = []
    layer = RandomKeys("block", keyed)

    def block(x: Tensor) -> Tensor:
        again.append(keyed.replayed())
        return F.dropout(x, 0.5)

    x = torch.ones(2, 50)
    for _ in range(2):  # two micro-batches
        with keyed.scope("task"):
            first, second = layer(block, x), layer(block, x)
            assert not torch.equal(first, second)
        for expected in (second, first):
            with again.pop():
                assert torch.equal(F.dropout(x, 0.5), expected)


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.randperm(3)])
def test_draws_from_other_generators_are_refused(draw: Callable[[], object]) -> None:
    with pytest.raises(WrongUse, match="depend on how the job is spread"):
        run(lambda x: (draw(), x)[1], [0, 1])
