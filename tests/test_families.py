"""Models of many families train and are proven as they come: of several parts, with experts, with unlike layers."""

from __future__ import annotations

import pytest

import phalanx
from phalanx.prove.proof import Proof, prove
from tests.families import FAMILIES, FamilyTask

EXPERTS = ("ernie-moe", "granite-moe-hybrid", "jetmoe", "llama4", "olmoe")
UNCUT = ("jamba", "jetmoe")
"""Of which no layer has a rule for tp."""


def verdicts(proof: Proof) -> dict[str, str]:
    return {str(result.layout): result.verdict for result in proof.results}


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_step_is_taken(kind: str) -> None:
    with phalanx.Engine(FamilyTask(kind=kind), "dp=1", device="cpu") as engine:
        assert 0 < engine.step(next(engine.batches())).loss < 10


@pytest.mark.parametrize("kind", FAMILIES)
def test_it_is_proven(kind: str) -> None:
    layouts = ["dp=2", *([] if kind in UNCUT else ["tp=2"]), "fsdp=2,ep=2" if kind in EXPERTS else "fsdp=2"]
    proof = prove(FamilyTask(kind=kind), layouts)
    assert proof.holds, proof
    assert verdicts(proof) == dict.fromkeys(layouts, "equal")


@pytest.mark.parametrize(
    ("kind", "verdict"), [("gemma3n-text", "not applicable"), ("qwen2-audio", "equal"), ("qwen2-vl", "equal")]
)
def test_what_stands_before_the_blocks_is_on_the_first_stage(kind: str, verdict: str) -> None:
    (result,) = prove(FamilyTask(kind=kind), ["pp=2,micro_batch=6"]).results
    assert result.verdict == verdict
    assert not result.reason or "model.embed_tokens_per_layer" in result.reason


@pytest.mark.every
@pytest.mark.parametrize("kind", FAMILIES)
def test_it_is_proven_under_all_layouts_of_four_ranks(kind: str) -> None:
    proof = prove(FamilyTask(kind=kind), "all", ranks=4)
    assert proof.holds, proof
    assert {*verdicts(proof).values()} <= {"equal", "not applicable"}
    assert [*verdicts(proof).values()].count("equal") > 5
