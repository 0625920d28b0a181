"""A bug is there while it is planted, and gone afterwards."""

from __future__ import annotations

import pytest

from phalanx import WrongUse
from phalanx.parallel.weights.holding import Holding
from phalanx.prove.bugs.planting import find, planted


def test_nothing_is_left_of_a_bug() -> None:
    before = Holding.counts
    with planted("norm_counts_replicas_twice"):
        assert Holding.counts is not before
    assert Holding.counts is before


def test_an_unknown_bug_is_refused_with_those_near() -> None:
    with pytest.raises(WrongUse, match="norms_not_summed_over_tp"):
        find("norms_not_sumed_over_tp")
