"""A finding is made of what fails, even where it cannot be explained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.layout import Layout
from phalanx.prove.findings import NEXT, Findings
from phalanx.prove.ladder import Difference
from phalanx.prove.proof import prove
from phalanx.prove.ranks.outcome import TrialOutcome
from phalanx.prove.ranks.witness import Testimony
from phalanx.recipes.gpt import GPT
from tests.prove.tasks import Plain


def test_what_was_found_is_not_lost_over_its_explanation() -> None:
    nothing: Any = None
    seen = Difference(1, "loss", "count", 0.5, 0, "3", "2")
    outcome = TrialOutcome([Testimony(0, {"dp": 0, "fsdp": 0}, [seen])])
    finding = Findings(nothing, nothing, None).of(nothing, 0, outcome)
    assert (finding.rung, finding.name, finding.step, finding.shape) == ("loss", "count", 1, "unexplained")
    assert finding.cause.startswith("3, not 2. That it differs stands.")
    assert "this is a bug in phalanx prove, not in your task" in finding.cause
    assert "Please report it" in finding.cause


def test_a_run_that_stopped_is_told_even_where_that_cannot_be_explained() -> None:
    nothing: Any = None
    finding = Findings(nothing, nothing, None).of(nothing, 0, TrialOutcome(unfinished=[1]))
    assert (finding.rung, finding.name, finding.ranks, finding.shape) == ("running", "the run", [1], "unexplained")
    assert "not in your task" in finding.cause


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


class Ranged(nn.Module):
    """Attention that notes the range of what it is given, as models do that will be quantised."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(2, 4), nn.Linear(2, 4), nn.Linear(2, 3)
        self.register_buffer("least", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (3, 2))
        if self.training:
            self.least.mul_(0.9).add_(0.1 * x.detach().min())
        scores = self.query(x) @ self.key(x).mT  # to which the key's bias adds the same everywhere: no gradient
        return (scores.softmax(-1) @ self.value(x)).mean(1)


@dataclass
class RangedTask(Plain):
    def model(self) -> nn.Module:
        return Ranged()


def test_gradients_that_are_rounding_alone_are_not_what_fails() -> None:
    """A buffer differs, as each rank has samples of its own; the bias of the keys is the same but for rounding."""
    finding = prove(RangedTask(), ["dp=2"]).results[0].finding
    assert finding is not None
    assert (finding.rung, finding.name) == ("buffers", "least")
    assert "Ranged computes it in its forward, from the samples of one micro-batch at a time" in finding.cause
    assert "test_findings.py" in finding.where
