"""How activations are sharded: a part draws what it would draw in the whole, and a layout ends where it should."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phalanx import WrongUse
from phalanx.parallel.forward.activations import WHOLE, ActivationLayout, Activations
from phalanx.parallel.randomness.draws import Moment, Randomness

PLACES = torch.tensor([1, 2, 6])


def drawn(layout: ActivationLayout, *shape: int) -> torch.Tensor:
    """Of two samples."""
    keyed = Randomness(0, Moment(slots=np.arange(2)), torch.device("cpu"))
    with keyed.scope("block"), keyed.activations.handed(layout):
        return keyed.uniform(torch.Size([2, *shape]))


def test_a_part_draws_its_part_of_the_whole() -> None:
    stream, scores = drawn(WHOLE, 8, 5), drawn(WHOLE, 4, 8, 8)
    assert torch.equal(drawn(ActivationLayout(8, PLACES, PLACES), 3, 5), stream[:, PLACES])
    shard = ActivationLayout(8, PLACES, PLACES[:2])
    assert torch.equal(drawn(shard, 2, 5), stream[:, PLACES[:2]])
    inside = shard.inside(torch.arange(2, 4), torch.arange(1, 3))
    assert torch.equal(drawn(inside, 3, 2), stream[:, PLACES][:, :, 2:4])
    assert torch.equal(drawn(inside, 2, 3, 8), scores[:, 1:3][:, :, PLACES])
    assert torch.equal(drawn(ActivationLayout(8, heads=torch.arange(1, 3)), 2, 8, 8), scores[:, 1:3])


def test_one_for_a_sample_is_not_cut() -> None:
    assert torch.equal(drawn(ActivationLayout(8, PLACES, PLACES), 1, 1), drawn(WHOLE, 1, 1))


def test_a_draw_whose_place_cannot_be_told_is_refused() -> None:
    with pytest.raises(WrongUse, match="3 of dim 0 are on this rank: its place in the whole cannot be told"):
        drawn(ActivationLayout(8, PLACES, PLACES), 8, 5)


def test_positions_are_held_together_with_the_other_ranks_of_tp() -> None:
    assert ActivationLayout(8, PLACES, PLACES[:2]).held == 3
    assert ActivationLayout(8, None, PLACES).held == 8


def test_a_layout_lasts_from_the_first_block_to_the_last() -> None:
    activations = Activations()
    own = ActivationLayout(8, PLACES, PLACES)
    activations.enter(own)
    assert activations.layout is activations.stream is own
    activations.turn_inside(own.inside(torch.arange(2), None))
    assert activations.layout.features is not None
    assert activations.stream is own
    with activations.handed(WHOLE):
        assert activations.layout is WHOLE
    assert activations.layout.features is not None
    activations.turn_outside()
    activations.leave()
    assert (activations.layout.length, activations.layout.time) == (8, None)


def test_what_a_scope_leaves_sharded_ends_with_it() -> None:
    keyed = Randomness(0, Moment(), torch.device("cpu"))
    with keyed.scope("task"):
        keyed.activations.enter(ActivationLayout(8, PLACES, PLACES))
        keyed.activations.turn_inside(ActivationLayout(8))
        with keyed.scope("block"):
            assert keyed.activations.layout.time is PLACES
    assert keyed.activations.layout is WHOLE
