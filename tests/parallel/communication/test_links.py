"""Every link between ranks is timed, each once."""

from __future__ import annotations

import pytest
import torch

from phalanx.parallel.communication import links
from tests.ranks import Ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize("number", [2, 3, 4])
def test_any_two_are_timed(ranks: Ranks, number: int) -> None:
    first, *others = ranks(number, links.pairs, list(range(number)), CPU, 1)
    assert set(first) == {(a, b) for a in range(number) for b in range(number) if a != b}
    assert all(rate > 0 for rate in first.values())
    assert not any(others)


def test_some_of_the_ranks_and_a_ring(ranks: Ranks) -> None:
    assert set(ranks(4, links.pairs, [0, 2], CPU, 1)[0]) == {(0, 2), (2, 0)}
    assert set(ranks(3, links.ring, CPU, 1)[0]) == {(0, 1), (1, 2), (2, 0)}
