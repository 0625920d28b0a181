"""What a layout must send, and what is said when it does not."""

from __future__ import annotations

from collections import Counter

import pytest

from phalanx.prove.proof import prove
from phalanx.prove.ranks.census import amiss
from tests.prove.lacking import MODELS, Lacking

BOUNDS = {("dp", "all-reduce"): (100.0, 100.0), ("tp", "all-gather"): (0.0, float("inf"))}


def said(sent: dict[tuple[str, str], int]) -> list[str]:
    return [words for _, _, words in amiss(Counter(dict.fromkeys(sent, 1)), Counter(sent), BOUNDS)]


def test_a_missing_kind_is_named_with_its_axis() -> None:
    assert said({("dp", "all-reduce"): 100}) == ["no all-gather over tp was seen, where the layout needs one"]


def test_too_little_and_too_much_are_told() -> None:
    assert "needs 100" in said({("dp", "all-reduce"): 50, ("tp", "all-gather"): 7})[0]
    assert "no more than 100" in said({("dp", "all-reduce"): 200, ("tp", "all-gather"): 7})[0]
    assert said({("dp", "all-reduce"): 100, ("tp", "all-gather"): 0}) == []


CUT, TRAINED = ["tp=2,pp=2"], ["fsdp=2,pp=2", "pp=2,schedule=zb", "tp=2,pp=2"]
LAYOUTS = {
    "experts in the last block": ["fsdp=2,pp=2,ep=2"],
    "experts in the first block": ["fsdp=2,pp=2,ep=2,zero=2"],
    "attention in the first block": ["cp=2,pp=2", "cp=2,pp=2,cp_kind=ulysses"],
    "attention in the last block": ["cp=2,pp=2", "cp=2,pp=2,cp_kind=ulysses"],
    "no attention": ["cp=2", "cp=2,pp=2,cp_kind=ulysses"],
    "nothing to cut in the last blocks": CUT,
    "nothing to cut in the first blocks": CUT,
    "no weights in blocks": ["fsdp=2", "pp=2"],
    "nothing to train on the first stage": TRAINED,
    "nothing to train on the last stage": TRAINED,
    "nothing to train in blocks": TRAINED,
    "a norm that is never called": ["dp=2", "pp=2"],
}


@pytest.mark.parametrize("without", MODELS)
def test_a_rank_that_has_none_of_a_thing_needs_no_message_for_it(without: str) -> None:
    proof = prove(Lacking(without=without), LAYOUTS[without])
    assert {result.verdict for result in proof.results} == {"equal"}, proof
