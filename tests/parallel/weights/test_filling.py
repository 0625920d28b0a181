"""Weights of this rank alone: what other stages have takes no memory here."""

from __future__ import annotations

import phalanx
from phalanx import Layout
from tests.parity import HostileLanguage
from tests.ranks import Ranks


def kept() -> tuple[set[str], set[str]]:
    with phalanx.Engine(HostileLanguage(), Layout(pp=2), device="cpu") as engine:
        weights = engine.spread.model.named_parameters()
        return set(engine.spread.weights), {name for name, weight in weights if not weight.is_meta}


def test_a_stage_holds_its_own_weights(ranks: Ranks) -> None:
    (first, first_real), (second, second_real) = ranks(2, kept)
    assert first == first_real
    assert second == second_real
    assert first & second == {"embedding.weight", "unused", "rare", "scalar"}
    assert "blocks.0.attention.q_proj.weight" in first - second
    assert "norm.weight" in second - first
