"""A part beside the whole that it is of."""

from __future__ import annotations

import numpy as np
import torch

from phalanx.prove.ranks.pieces import Piece

WHOLE = torch.arange(4 * 6 * 5).view(4, 6, 5)


def same(piece: Piece) -> bool:
    pair = piece.beside(WHOLE, 4)
    assert pair is not None
    return torch.equal(*pair)


def test_rows_positions_and_features_are_found() -> None:
    slots, times = np.array([1, 3]), torch.tensor([0, 5])
    assert same(Piece(WHOLE[[1, 3]], slots))
    assert same(Piece(WHOLE[[1, 3]][:, times], slots, [times]))
    assert same(Piece(WHOLE[[1, 3]][..., 2:4], slots, features=[((2, 4),)]))
    assert same(Piece(WHOLE[[1, 3]][:, :4], slots))  # padded less


def test_folded_tokens_are_unfolded() -> None:
    slots = np.array([2])
    pair = Piece(WHOLE[2], slots).beside(WHOLE.flatten(0, 1), 4)
    assert pair is not None
    assert torch.equal(*pair)


def test_what_cannot_be_told_is_not_compared() -> None:
    assert Piece(torch.zeros(2, 6), np.array([1, 3])).beside(WHOLE, 4) is None
    assert Piece(torch.zeros(2, 7, 5), np.array([1, 3])).beside(WHOLE, 4) is None
