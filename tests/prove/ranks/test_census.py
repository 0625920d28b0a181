"""What a layout must send, and what is said when it does not."""

from __future__ import annotations

from collections import Counter

from phalanx.prove.ranks.census import amiss

BOUNDS = {("dp", "all-reduce"): (100.0, 100.0), ("tp", "all-gather"): (0.0, float("inf"))}


def said(sent: dict[tuple[str, str], int]) -> list[str]:
    return [words for _, _, words in amiss(Counter(dict.fromkeys(sent, 1)), Counter(sent), BOUNDS)]


def test_a_missing_kind_is_named_with_its_axis() -> None:
    assert said({("dp", "all-reduce"): 100}) == ["no all-gather over tp was seen, where the layout needs one"]


def test_too_little_and_too_much_are_told() -> None:
    assert "needs 100" in said({("dp", "all-reduce"): 50, ("tp", "all-gather"): 7})[0]
    assert "no more than 100" in said({("dp", "all-reduce"): 200, ("tp", "all-gather"): 7})[0]
    assert said({("dp", "all-reduce"): 100, ("tp", "all-gather"): 0}) == []
