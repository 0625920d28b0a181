"""A loss: a sum and a count; several by name, each over its own."""

from __future__ import annotations

import pytest
import torch

from phalanx import Loss, WrongUse, losses
from phalanx.loss import counted_by


def test_a_sum_is_of_means() -> None:
    x, y = torch.tensor(6.0, requires_grad=True), torch.tensor(10.0, requires_grad=True)
    loss = losses.sum(a=Loss(2 * x, 3), b=0.5 * Loss(y, torch.tensor(5)), c=Loss(x * 0, 0))
    assert float(loss.total / loss.count) == pytest.approx(2 * 6 / 3 + 0.5 * 10 / 5)
    assert float(loss.count) == 5, "of the loss with the most terms"
    (loss.total / loss.count).backward()
    assert float(x.grad) == pytest.approx(2 / 3)
    assert float(y.grad) == pytest.approx(0.1)
    assert [float(part.total) for part in loss.parts.values()] == [12, 5, 0]


def test_equal_counts_change_nothing() -> None:
    one, two = torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)
    loss = losses.sum(a=Loss(one, 3), b=Loss(two, 3))
    assert float(loss.total) == 0.1 + 0.7
    assert float(loss.count) == 3


def test_counts_of_a_larger_batch_are_asked_for() -> None:
    with counted_by(lambda names, own: own * torch.tensor([1.0, 10.0])):
        loss = losses.sum(a=Loss(torch.tensor(4.0), 2), b=Loss(torch.tensor(9.0), 1))
    assert (float(loss.total), float(loss.count)) == (4 * 10 / 2 + 9, 1)
    with counted_by(lambda names, own: None):
        loss = losses.sum(a=Loss(torch.tensor(4.0), 2), b=Loss(torch.tensor(9.0), 1))
    assert (float(loss.total), float(loss.count)) == (13, 2), "whoever asked sees to it that counts are the same"


def test_what_is_no_loss_is_refused() -> None:
    good = Loss(torch.tensor(1.0), 1)
    for named, told in (
        ({}, "no losses"),
        ({"a": good, "b": torch.tensor(1.0)}, "a Tensor as b"),
        ({"a": Loss(torch.tensor(1.0))}, "a loss without a count as a"),
        ({"a": losses.sum(b=good)}, "a sum of losses as a"),
        ({"a": (0.5, good)}, "a tuple as a"),
    ):
        with pytest.raises(WrongUse, match=told):
            losses.sum(**named)


def test_a_weight_keeps_names() -> None:
    loss = 0.5 * losses.sum(a=Loss(torch.tensor(4.0), 2))
    assert float(loss.total) == 2
    assert float(loss.parts["a"].total) == 2
