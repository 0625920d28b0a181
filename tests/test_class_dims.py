"""Which dim has the classes: never decided by the sizes of a batch."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from phalanx import Logits, WrongUse, losses
from phalanx.class_dims import class_dim, class_weights


def ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long)


@pytest.mark.parametrize(
    ("output", "targets", "dim", "found"),
    [
        ((4, 3), (4,), None, 1), ((4, 3), (4,), -1, 1), ((3,), (), None, 0), ((4, 3, 8), (4, 8), None, 1),
        ((4, 8, 3), (4, 8), -1, 2), ((4, 8, 3), (4, 8), 2, 2), ((3, 4), (4,), 0, 0), ((7, 7, 7), (7, 7), 1, 1),
        ((7, 7, 7), (7, 7), -1, 2), ((4, 3, 8, 8), (4, 8, 8), None, 1), ((4, 8, 8, 3), (4, 8, 8), 3, 3),
    ],
)  # fmt: skip
def test_the_second_or_the_one_that_is_asked_for(output: Any, targets: Any, dim: Any, found: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert class_dim(torch.zeros(output), ids(*targets), dim) == found
        assert class_dim(torch.zeros(output), torch.zeros(output), dim) == found


def test_of_logits_it_is_the_last() -> None:
    logits = Logits(torch.zeros(7, 7, 2), torch.zeros(7, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert class_dim(logits, ids(7, 7), None) == class_dim(logits.computed(logits.tensor()), ids(7, 7), None) == 2
    assert class_dim(logits, ids(7, 7), 1) == 1


def test_sizes_that_fit_two_ways_are_told_and_taken_as_torch_takes_them() -> None:
    """A byte model with as many positions as bytes is otherwise trained to predict positions."""
    with pytest.warns(UserWarning, match="dim=-1 for a language model") as told:
        losses.cross_entropy(torch.zeros(2, 7, 7), ids(2, 7))
    assert told[0].filename == __file__


@pytest.mark.parametrize(
    ("output", "targets", "dim", "told"),
    [
        ((4, 3), ids(5), None, r"\(4, 3\).*\(5,\)"),
        ((4, 16, 97), ids(4, 16), None, r"targets of shape \(4, 97\) are expected.*language model.*targets, dim=-1\)"),
        ((4, 97, 16), ids(4, 16), -1, r"Classes are in dim 2, so that.*If they are in dim 1, write dim=1"),
        ((4, 8, 3, 8, 2), ids(4, 8, 8, 2), None, r"write dim=2: "),
        ((4, 3), torch.zeros(4), None, r"Write targets.long\(\)"),
        ((4, 3), ids(4, 3), None, r"Write targets.float\(\), or.*targets.argmax\(-1\)"),
        ((4, 3, 8), ids(4, 3, 8), None, r"targets.argmax\(1\)"),
        ((4,), ids(4), None, r"binary_cross_entropy\(output, targets.float\(\)\)"),
        ((4, 1), ids(4, 1), None, r"binary_cross_entropy\(output, targets.float\(\)\)"),
        ((4, 3, 8), torch.zeros(4, 8, 3), None, "do not belong together"),
        ((4, 3), ids(4), 2, "it has no dim 2"),
        ((), ids(), None, "it has no dim 0"),
    ],
)
def test_targets_that_do_not_fit_are_refused(output: Any, targets: torch.Tensor, dim: Any, told: str) -> None:
    with pytest.raises(WrongUse, match=told):
        class_dim(torch.zeros(output), targets, dim)


def test_a_weight_for_each_class() -> None:
    found = class_weights([1, 2, 3], torch.zeros(2, dtype=torch.float64), 3)
    assert found is not None
    assert (found.tolist(), found.dtype) == ([1, 2, 3], torch.float64)
    assert class_weights(None, torch.zeros(2), 3) is None
    with pytest.raises(WrongUse, match=r"shape \(4,\), and the output has 3 classes"):
        class_weights(torch.ones(4), torch.zeros(4, 3), 3)
