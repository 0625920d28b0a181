"""Every link between ranks is timed, each once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from phalanx.parallel.communication import links
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.traffic import Traffic
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


def speed() -> links.Speed:
    return links.along(Communicator(dist.group.WORLD, Traffic(), "dp"), CPU)


def test_a_group_measures_one_speed(ranks: Ranks) -> None:
    first, *others = ranks(3, speed)
    assert all(other == first for other in others)
    assert first.rate > 1e6
    assert 0 < first.latency < 10
    assert links.SMALLEST <= first.size <= links.LARGEST


def speeds(hosts: list[int]) -> tuple[links.Speed, float, int]:
    """Of the link, of collectives inside of hosts first, and how many of these there were to find it out."""
    group = Communicator(dist.group.WORLD, Traffic(), "dp", hosts)
    found = links.along(group, CPU)
    before = group.traffic.calls.copy()
    rate = links.hosts_first(group, CPU, found)
    group._background.close()
    return found, rate, (group.traffic.calls - before)["default_pg", "all-gather"]


def test_what_goes_inside_of_hosts_first_is_measured_where_anything_does(ranks: Ranks) -> None:
    first, *others = ranks(4, speeds, [0, 0, 1, 1])
    assert all(other == first for other in others)
    assert first[1] > 0
    assert first[2] == 2
    for link, rate, collectives in ranks(4, speeds, [0, 0, 0, 1]):
        assert (rate, collectives) == (link.rate, 0)


def test_each_pair_is_measured_once_and_nobody_twice_in_a_round() -> None:
    for number in range(2, 7):
        for all_pairs in (True, False):
            rounds = links.rounds_of(list(range(number)), all_pairs)
            met = [tuple(sorted(pair)) for found in rounds for pair in found]
            if number > 2 or all_pairs:
                assert len(set(met)) == len(met) == (number * (number - 1) // 2 if all_pairs else number)
            assert all(len({rank for pair in found for rank in pair}) == 2 * len(found) for found in rounds)
