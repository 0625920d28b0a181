"""One device as every site in turn: whole proofs hold, and one of another outer step does not."""

from __future__ import annotations

import pytest
import torch

from phalanx.layout import Layout
from phalanx.local_updates import LocalUpdates
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.parallel.weights.placement import Placement
from phalanx.prove.proof import prove
from phalanx.prove.reference.hostile import Trial, hostile
from phalanx.prove.reference.sites import EverySite, boundary, divided
from tests.prove.tasks import Plain

LAYOUTS = ["dp=2,comm=diloco:2", "dp=2,fsdp=2,comm=local:16:int4", "dp=2,comm=diloco:16:int4:fragments=4:overlap=3"]


def sites(comm: str) -> EverySite:
    task, layout = hostile(Plain(), Trial(4)), Layout.parse(f"dp=2,comm={comm}")
    blueprint = Blueprint(task.model, task.seed)
    placement = Placement.of(blueprint.model, task.anatomy(blueprint.model), layout.site)
    return EverySite(task, layout, placement).run(4)


def test_proofs_hold() -> None:
    proof = prove(Plain(), LAYOUTS)
    assert [result.verdict for result in proof.results] == ["equal"] * 3, proof
    assert proof.bar <= 1e-9


def test_a_fragment_that_travels_arrives_at_the_last_step() -> None:
    local = LocalUpdates("diloco", 16, fragments=4, overlap=3).shortened()
    assert local.leaving(5) is not None
    assert local.arriving(6) is not None, "what left after step 5 is on its way, or has just come, when a run of 6 ends"
    (result,) = prove(Plain(), LAYOUTS[-1:], steps=6).results
    assert result.verdict == "equal", result


def test_another_momentum_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalUpdates, "outer", property(lambda self: (0.7, 0.5)))  # the reference's: ranks are forked
    proof = prove(Plain(), ["dp=2,comm=diloco:2"])
    (result,) = proof.results
    assert result.verdict == "differs"
    assert result.finding is not None
    assert (result.finding.rung, result.finding.step) == ("weights", 1)
    assert "look at train/sites.py" in result.finding.next


def test_sites_have_their_own_samples_and_agree() -> None:
    first, second = sites("local:2").sites
    for step, (a, b) in enumerate(zip(first.steps, second.steps, strict=True)):
        assert {slot for slot, (index, _) in enumerate(a.read) if index >= 0}.isdisjoint(
            slot for slot, (index, _) in enumerate(b.read) if index >= 0
        )
        assert torch.equal(a.weights["0.weight"], b.weights["0.weight"]) == (step % 2 == 1)
        assert a.terms == b.terms == a.count + b.count


def test_what_is_told_late_is_counted_late() -> None:
    found = sites("diloco:4:fragments=2:overlap=1").sites
    counts = [sum(site.steps[step].count for site in found) for step in range(4)]
    assert [step.terms for step in found[0].steps] == [0, *counts[:3]]


def test_fragments_and_boundaries() -> None:
    assert divided({"a": 1, "b": 8, "c": 1, "d": 6, "e": 2}, 2) == [["a", "b"], ["c", "d", "e"]]
    two, four = LocalUpdates("local", 2), LocalUpdates("local", 4)
    assert [boundary(two, 2, 5), boundary(two, 2, 4), boundary(four, 2, 5), boundary(four, 5, 10)] == [4, 2, 4, 8]
