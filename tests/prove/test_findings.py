"""A finding is made of what fails, even where it cannot be explained."""

from __future__ import annotations

from typing import Any

from phalanx.layout import Layout
from phalanx.prove.findings import NEXT, Findings
from phalanx.prove.ladder import Difference
from phalanx.prove.proof import prove
from phalanx.prove.ranks.outcome import TrialOutcome
from phalanx.prove.ranks.witness import Testimony
from phalanx.recipes.gpt import GPT


def test_what_was_found_is_not_lost_over_its_explanation() -> None:
    nothing: Any = None
    seen = Difference(1, "loss", "count", 0.5, 0, "3", "2")
    outcome = TrialOutcome([Testimony(0, {"dp": 0, "fsdp": 0}, [seen])])
    finding = Findings(nothing, nothing, None).of(nothing, 0, outcome)
    assert (finding.rung, finding.name, finding.step, finding.shape) == ("loss", "count", 1, "unexplained")
    assert "could not be explained further" in finding.cause


def test_sums_in_few_bits_are_told_with_what_they_should_be() -> None:
    nothing: Any = None
    seen = Difference(1, "loss", "total", 0.1, 0, "1.3275", "1.25")
    outcome = TrialOutcome([Testimony(0, {"dp": 0, "fsdp": 0}, [seen])])
    finding = Findings(nothing, nothing, None)._coded(Layout.parse("dp=2,comm=int4"), outcome, ["dp"])
    assert finding.cause == (
        "total is not what one device finds that rounds as comm=int4 is defined to. It is 1.3275, and should be 1.25."
    )
    assert finding.next.startswith("Prove dp=2 first")


def test_the_smallest_layout_is_named_with_what_to_do() -> None:
    finding = prove(GPT(), ["fsdp=2,tp=2"], inject="norms_not_summed_over_tp").results[0].finding
    assert finding is not None
    assert finding.minimal.startswith("tp=2")
    assert finding.axes == ["tp"]
    assert finding.next == NEXT
