"""A restored tensor is told for what it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.parallel.axes.cuts import Cut
from phalanx.prove.ladder import Standard
from phalanx.prove.ranks.restored import likeness
from phalanx.prove.reference.hostile import Trial, hostile
from phalanx.prove.reference.loop import Reference
from tests.prove.tasks import Plain

NAME = "0.weight"


@pytest.fixture(scope="module")
def standard() -> Standard:
    return Standard.measured(Reference(hostile(Plain(), Trial(3))).run(), [])


def words(standard: Standard, found: Tensor | None, rung: str = "weights", name: str = NAME) -> str:
    """Of rows 2:4 of the second half of a weight of 8 rows."""
    cut = Cut(0, (((0, 4),), ((4, 8),)))
    weight: Any = SimpleNamespace(first=2, last=4)
    return likeness(standard, 1, rung, name, found, lambda whole: whole[6:8], weight, cut, 1)


def test_a_tensor_is_told_for_what_it_is(standard: Standard) -> None:
    right = standard.steps[1].weights[NAME]
    assert words(standard, None) == "was not restored: there is none"
    assert words(standard, right[6:8] * torch.nan) == "was not restored"
    assert words(standard, torch.stack([right[6], right[7] * torch.nan])) == "was not restored in its rows 1:2"
    assert words(standard, right[6:8] * 0) == "was not restored: it is zero"
    assert "constructor" in words(standard, standard.initial[NAME][6:8])
    assert "as after step 0, not as after step 1" in words(standard, standard.steps[0].weights[NAME][6:8])
    assert words(standard, right[2:4]) == "has the part of rank 0 of tp where that of rank 1 belongs"
    assert words(standard, right[4:6]) == "has rows 0:2 where rows 2:4 belong"
    assert words(standard, right[6:8] / 2) == "is 1/2 times what was saved"
    assert words(standard, right[6:8].flip(0)) == "has the right rows in another order, along dim 0"
    assert words(standard, torch.stack([right[6], right[7] + 1])) == "is wrong in its rows 1:2, and right in the others"
    assert "bfloat16 rounds" in words(standard, right[6:8].to(torch.bfloat16).double())


def test_moments_have_other_steps_too(standard: Standard) -> None:
    before = standard.steps[0].moments[NAME]["exp_avg"][6:8]
    assert "as after step 0" in words(standard, before, "moments", f"{NAME} exp_avg")
