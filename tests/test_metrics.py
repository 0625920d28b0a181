"""What may be logged under which name; how what is logged becomes the step's is in train/test_logged.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import phalanx
from phalanx import Loss, WrongUse
from phalanx.metrics import logged_by


@pytest.mark.parametrize("name", ["", " a", "a ", "/a", "a/", "a//b", "../a", "a\nb", "a\0b", "é!", "x" * 101])
def test_names_that_some_place_cannot_have_are_refused(name: str) -> None:
    with pytest.raises(WrongUse, match=r"is no name\. Use letters"):
        phalanx.log(name, 1.0)


@pytest.mark.parametrize("name", ["loss", "lr", "grad_norm", "loss/box"])
def test_a_steps_own_numbers_keep_their_names(name: str) -> None:
    with pytest.raises(WrongUse, match=r"one of the step's own numbers\. Give it another"):
        phalanx.log(name, 1.0)


def test_a_name_is_text() -> None:
    with pytest.raises(WrongUse, match="got a int as a name"):
        phalanx.log(3, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "count", "told"),
    [
        (torch.zeros(2), None, r"a value of shape \(2,\), and logs one number\. Take its mean"),
        (torch.tensor(1j), None, "a complex value"),
        ("0.5", None, "got a str as its value"),
        (None, None, "got a NoneType as its value"),
        (1.0, -1, "a count of -1, which is no weight"),
        (1.0, float("nan"), "which is no weight"),
        (1.0, torch.zeros(3), r"a count of shape \(3,\)"),
        (Loss(torch.tensor(1.0), 2), 2, "whose own count is its weight"),
        (Loss(torch.tensor(1.0)), None, "whose own count is its weight"),
        (Loss(torch.zeros(2), 2), None, r"a total of shape \(2,\)"),
    ],
)
def test_values_that_are_no_numbers_are_refused(value: Any, count: Any, told: str) -> None:
    with pytest.raises(WrongUse, match=told):
        phalanx.log("accuracy", value, count)


def test_what_is_logged_goes_to_whoever_takes_it_and_else_nowhere() -> None:
    taken: list[Any] = []
    phalanx.log("accuracy", 0.25)
    with logged_by(lambda *given: taken.append(given)):
        phalanx.log("accuracy", 0.5)
        phalanx.log("Größe/β.b-c d", np.float32(2), count=3)
        phalanx.log("right", torch.ones(1, 1), count=torch.tensor(4))
    phalanx.log("accuracy", 0.75)
    assert [given[0] for given in taken] == ["accuracy", "Größe/β.b-c d", "right"]
    assert taken[0] == ("accuracy", 0.5, None)
    assert taken[1][1:] == (2, 3)
