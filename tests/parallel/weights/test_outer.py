"""What sites agree on: the outer step by itself, and what travels for it."""

from __future__ import annotations

import pytest
import torch

import phalanx
from phalanx.local_updates import LocalUpdates
from phalanx.parallel.weights.outer import OuterWeights
from tests.ranks import Ranks
from tests.tasks import Digits


def agreed(text: str, rate: float, momentum: float) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """Two outer steps of a weight that site 0 makes 1 less and site 1 makes 2 more in each; its bytes."""
    with phalanx.Engine(Digits(width=64), f"dp=2,comm={text}", device="cpu") as engine:
        local = LocalUpdates.parse(text)
        assert local is not None
        outer, found = OuterWeights.of(engine.spread, local), []
        outer.begin(rate, momentum)
        weight = engine.spread.weights["0.weight"]
        start = weight.shard.data.clone()
        for _ in range(2):
            sent = sum(engine.traffic.sent.values())
            weight.shard.data += [-1, 2][engine.mesh.index("dp")]
            for number in range(local.fragments):
                outer.arrive(number)
            bytes_sent = sum(engine.traffic.sent.values()) - sent
            found.append((weight.shard.data - start, outer.agreed["0.weight"] - start, bytes_sent))
        return found


@pytest.mark.parametrize("text", ["local:2", "local:2:int8", "local:2:int4", "local:2:bf16", "local:4:fragments=4"])
def test_the_mean_of_what_sites_have(ranks: Ranks, text: str) -> None:
    for found in ranks(2, agreed, text, 1.0, 0.0):
        for times, (own, all_have, _) in enumerate(found, 1):
            assert torch.equal(own, all_have)
            assert own.mean() == pytest.approx(0.5 * times, rel=0.02)


def test_momentum_is_nesterovs(ranks: Ranks) -> None:
    (_, first, _), (_, second, _) = ranks(2, agreed, "diloco:2", 0.7, 0.6)[0]
    assert first.mean() == pytest.approx(0.7 * (0.5 + 0.6 * 0.5))
    # each begins from what all agreed on: the change is 0.5 again
    assert second.mean() - first.mean() == pytest.approx(0.7 * (0.5 + 0.6 * (0.6 * 0.5 + 0.5)))


def late(text: str, mean: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A site makes a weight 1 less or 2 more, it leaves, and is made 3 less or 5 more while it travels."""
    with phalanx.Engine(Digits(width=64), f"dp=2,comm={text}", device="cpu") as engine:
        local = LocalUpdates.parse(text)
        assert local is not None
        outer, weight, site = OuterWeights.of(engine.spread, local), engine.spread.weights["0.weight"], engine.rank
        outer.begin(0.7, 0.6)
        start = weight.shard.data.clone()
        weight.shard.data += [-1, 2][site]
        outer.leave(0)
        weight.shard.data += [-3, 5][site]
        assert outer.travelling == {0}
        outer.arrive(0)
        assert not outer.travelling
        if mean:
            outer.average(0)
        return weight.shard.data - start, outer.agreed["0.weight"] - start


def test_what_is_discarded_changes_nothing(ranks: Ranks) -> None:
    assert ranks(2, discarded, "diloco:4:overlap=2") == [True] * 2


def discarded(text: str) -> bool:
    with phalanx.Engine(Digits(width=64), f"dp=2,comm={text}", device="cpu") as engine:
        local = LocalUpdates.parse(text)
        assert local is not None
        outer, weight = OuterWeights.of(engine.spread, local), engine.spread.weights["0.weight"]
        weight.shard.data += engine.rank
        own, agreed_on = weight.shard.data.clone(), outer.agreed["0.weight"].clone()
        outer.leave(0)
        outer.discard()
        alike = torch.equal(weight.shard.data, own) and torch.equal(outer.agreed["0.weight"], agreed_on)
        outer.arrive(0)  # it leaves once more
        return alike and not outer.travelling


def test_what_changed_while_it_travelled_is_added(ranks: Ranks) -> None:
    for site, (own, agreed_on) in enumerate(ranks(2, late, "diloco:4:overlap=2", False)):
        assert agreed_on.mean() == pytest.approx(0.7 * (0.5 + 0.6 * 0.5))
        assert own.mean() == pytest.approx(0.7 * (0.5 + 0.6 * 0.5) + [-3, 5][site])


def test_a_run_ends_with_the_mean_of_that(ranks: Ranks) -> None:
    for own, agreed_on in ranks(2, late, "diloco:4:overlap=2", True):
        assert torch.equal(own, agreed_on)
        assert agreed_on.mean() == pytest.approx(0.7 * (0.5 + 0.6 * 0.5) + 1)


def test_few_bits_take_few_bytes(ranks: Ranks) -> None:
    wide, narrow = (ranks(2, agreed, text, 1.0, 0.0)[0][0][2] for text in ("local:2", "local:2:int4"))
    assert wide == 4 * (4 * 64 + 64 + 64 * 3 + 3)
    assert narrow < wide / 3  # every weight fills blocks of its own


def own_weights() -> tuple[bool, bool, bool]:
    with phalanx.Engine(Digits(), "dp=2,comm=diloco:4:fragments=2:overlap=1", device="cpu") as engine:
        for batch in engine.batches():
            engine.step(batch)
            if engine.step_number == 4:
                break
        weight, outer = engine.spread.weights["0.weight"], engine.spread.outer
        assert outer is not None
        own, agreed_on = weight.shard.data.clone(), outer.agreed["0.weight"].clone()
        with outer.in_place():
            within = torch.equal(weight.shard.data, agreed_on)
        return within, torch.equal(weight.shard.data, own), torch.equal(own, agreed_on)


def test_weights_are_those_agreed_on_for_a_while(ranks: Ranks) -> None:
    assert ranks(2, own_weights) == [(True, True, False)] * 2
