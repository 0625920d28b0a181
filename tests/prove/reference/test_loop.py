"""The reference does what a plain loop does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import phalanx
from phalanx import Layout, Loss
from phalanx.prove.cases import Docket
from phalanx.prove.reference.hostile import Trial, hostile
from phalanx.prove.reference.loop import Reference
from phalanx.recipes.shapes import Shapes
from tests.prove.tasks import Contrastive, ContrastiveNorm, Plain, Several


def test_samples_add_up_to_the_batch() -> None:
    task = hostile(Plain(), Trial(2))
    step = Reference(task).run(1).steps[0]
    total = torch.stack([g["0.weight"] for g in Reference(task).gradients_by_slot(0)]).sum(0) / step.count
    want = step.gradients["0.weight"]
    assert want is not None
    assert torch.allclose(total, want, rtol=1e-12)
    assert len(step.ids) == len(step.read) == 17


def test_it_repeats_itself_and_changes_with_a_nudge() -> None:
    task = hostile(Plain(), Trial(2))
    one, two, other = (Reference(task, nudge=n).run().steps[1].weights["0.weight"] for n in (0, 0, 1))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.allclose(one, other, rtol=1e-10)


def test_batch_norm_couples_samples() -> None:
    assert not Reference(hostile(Plain(), Trial(1))).run(1).couples_samples
    task = hostile(Shapes().tiny(), Trial(1))
    assert Reference(task).run(1).couples_samples
    one, three = (Reference(task, groups).run(1).steps[0].total for groups in (1, 3))
    assert one != three


def test_what_needs_all_samples_of_a_step_is_known() -> None:
    def of(task: Plain) -> Reference:
        return Reference(hostile(task, Trial(1))).run(1)

    found = [of(task) for task in (Plain(), Contrastive(), ContrastiveNorm(), Several(), Several(terms=1))]
    assert [reference.at_once for reference in found] == [False, True, True, True, False]
    assert [reference.gathers for reference in found] == [False, True, True, False, False]
    assert [reference.sums for reference in found] == [False, False, False, True, True]


@dataclass
class Later(Plain):
    """Two turns that train the same weights, of which the second compares samples."""

    turns = ("plain", "comparing")

    def trains(self, turn: str, weight: str) -> bool:
        return True

    def loss(self, output: Tensor, batch: Any) -> Loss:
        if batch.turn == "comparing":
            return Loss((output - phalanx.gather(output).mean(0)).square().sum(), len(output))
        return super().loss(output, batch)


def test_a_later_turn_that_needs_all_samples_is_found() -> None:
    docket = Docket(Later(), 3, 2)
    assert docket.cases[docket.number(Layout(dp=2))].at_once


class TwoNorms(nn.Sequential):
    """Of which one keeps its own mean and variance, and one is never called."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        self[1].spare = nn.BatchNorm1d(8)

    def train(self, mode: bool = True) -> TwoNorms:
        super().train(mode)
        self[2].eval()
        return self


def test_norms_that_a_step_computes_the_statistics_of_are_noted() -> None:
    @dataclass
    class Normed(Plain):
        def model(self) -> nn.Module:
            return TwoNorms()

    called = Reference(hostile(Normed(), Trial(1))).run(1).steps[0].called
    assert called & {"1", "1.spare", "2"} == {"1"}
