"""Losses of several micro-batches that need each other's samples, against what follows from the definition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx import Loss, WrongUse
from phalanx.prove.reference.hostile import Trial, hostile
from phalanx.prove.reference.loop import Reference
from phalanx.prove.reference.together import losses_together
from tests.prove.tasks import Plain

PARTS = [np.arange(0, 2), np.arange(2, 5)]


def test_each_micro_batch_counts_its_own_rows_of_all() -> None:
    weight = torch.tensor([1.0, -2.0, 3.0, 0.5, 4.0], dtype=torch.float64, requires_grad=True)

    def loss_of(slots: np.ndarray) -> Loss:
        own = weight[torch.from_numpy(slots)] * 2
        every = phalanx.gather(own)
        assert torch.equal(every[phalanx.rows(own)], own)
        again = phalanx.gather(own * every.sum())
        return phalanx.losses.sum(a=Loss((own * again.sum()).sum(), len(own)), b=Loss(own.sum(), 3 * len(own)))

    losses = losses_together([(slots, lambda slots=slots: loss_of(slots)) for slots in PARTS])  # type: ignore[misc]
    sum(loss.total for loss in losses).backward()  # type: ignore[union-attr]
    own = weight.detach().clone().requires_grad_()
    doubled = 2 * own  # the counts are 5 and 15: the first has three times too few terms
    (3 * doubled.sum() * doubled.sum() * doubled.sum() + doubled.sum()).backward()
    assert own.grad is not None
    assert torch.allclose(weight.grad, own.grad, rtol=1e-12)  # type: ignore[arg-type]
    assert [float(loss.count) for loss in losses] == [6, 9]  # type: ignore[arg-type]


def test_what_one_micro_batch_alone_asks_is_refused() -> None:
    def loss_of(slots: np.ndarray) -> Loss:
        x = torch.ones(len(slots))
        return Loss(phalanx.gather(x).sum() if len(slots) > 2 else x.sum(), 1)

    with pytest.raises(WrongUse, match="in some micro-batches and not in others"):
        losses_together([(slots, lambda slots=slots: loss_of(slots)) for slots in PARTS])  # type: ignore[misc]


@dataclass
class Overlap(Plain):
    """Batch-norm, and a loss over all samples of a step."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))

    def loss(self, output: Tensor, batch: dict[str, Any]) -> Loss:
        found = phalanx.gather(output.softmax(-1))
        wanted = phalanx.gather(nn.functional.one_hot(batch["y"], 3))
        overlap = 1 - 2 * (found * wanted).sum() / (found.sum() + wanted.sum())
        return Loss(overlap * len(output), len(output))


def test_batch_norm_sees_a_micro_batch_and_the_loss_all_of_them() -> None:
    trial = Trial(1)
    reference = Reference(hostile(Overlap(), trial), 3)
    trial.together = True
    outputs, wanted = [], []
    for first, last in ((0, 5), (5, 11), (11, 17)):
        batch, _ = reference.batch(0, np.arange(first, last))
        reference.model.train()
        with reference.randomness.scope("task"):
            outputs.append(reference.output(0, np.arange(first, last), batch).softmax(-1))
        wanted.append(nn.functional.one_hot(batch["y"], 3))
    found, right = torch.cat(outputs), torch.cat(wanted)
    overlap = 17 * (1 - 2 * (found * right).sum() / (found.sum() + right.sum()))
    (by_hand,) = torch.autograd.grad(overlap, [reference.parameters["0.weight"]])
    step = Reference(reference.task, 3).run(1).steps[0]
    assert step.total == pytest.approx(overlap.item(), rel=1e-12)
    gradient = step.gradients["0.weight"]
    assert gradient is not None
    assert torch.allclose(gradient * 17, by_hand, rtol=1e-10)
