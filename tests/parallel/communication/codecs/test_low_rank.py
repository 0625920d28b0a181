from __future__ import annotations

import math

import torch

from phalanx.parallel.communication.codecs.low_rank import LowRank, direction, first_basis, orthogonal


def test_columns_are_orthogonal_and_of_length_one() -> None:
    found = orthogonal(torch.randn(3, 20, 4, dtype=torch.float64) * torch.logspace(0, -6, 4))
    assert torch.allclose(found.mT @ found, torch.eye(4, dtype=torch.float64).expand(3, 4, 4), atol=1e-12)


def test_a_column_that_says_nothing_new_becomes_nothing() -> None:
    one, other = torch.randn(2, 9, 1, dtype=torch.float64)
    (found,) = orthogonal(torch.cat([one, 3 * one, other, one - other], 1)[None])
    assert torch.equal(found.norm(dim=0) > 0.5, torch.tensor([True, False, True, False]))
    assert not found[:, 1].any()
    assert not orthogonal(torch.zeros(1, 5, 2)).any()


def test_what_is_not_finite_stays_so() -> None:
    for bad in (math.nan, math.inf):
        matrices = torch.randn(2, 5, 2)
        matrices[0, 3, 1] = bad
        found = orthogonal(matrices)
        assert not found[0].isfinite().all()
        assert found[1].isfinite().all()


def test_where_nothing_is_kept_it_begins_as_it_was_drawn() -> None:
    first, kept = first_basis("a.weight", 6, 2), torch.zeros(6, 2, dtype=torch.float64)
    kept[:, 1] = 2.0
    assert torch.equal(first, first_basis("a.weight", 6, 2))
    assert not torch.equal(first, first_basis("b.weight", 6, 2))
    found = direction(kept, first)
    assert torch.equal(found[:, 0], first[:, 0])
    assert torch.allclose(found[:, 1], torch.full((6,), 6**-0.5, dtype=torch.float64))


def test_matrices_are_taken_that_become_less() -> None:
    codec = LowRank(2)
    assert codec.takes(torch.Size([40, 4]))
    assert codec.takes(torch.Size([8, 3, 3, 3]))
    assert not any(codec.takes(torch.Size(shape)) for shape in ([], [100], [4, 4], [2, 1000]))
