"""Names for tuples."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

import phalanx
from phalanx import WrongUse


def test_values_get_their_names() -> None:
    pairs = TensorDataset(torch.arange(6.0).view(3, 2), torch.arange(3))
    named = phalanx.data.Named(pairs, "x", "y")
    assert len(named) == 3
    assert named[2]["y"] == 2
    assert named[2]["x"].tolist() == [4, 5]


def test_names_that_do_not_fit_are_refused() -> None:
    with pytest.raises(WrongUse, match="no names"):
        phalanx.data.Named([])
    with pytest.raises(WrongUse, match="sample 0 is \\(1, 2\\), for which there are 3 names: a, b, c"):
        phalanx.data.Named([(1, 2)], "a", "b", "c")[0]
