"""Precision: four dtypes each, and casts that leave whole numbers alone."""

from __future__ import annotations

from typing import NamedTuple, get_args

import pytest
import torch

from phalanx import precision
from phalanx.precision import DTYPES, cast
from phalanx.task import Precision


def test_every_precision_has_its_dtypes() -> None:
    assert set(DTYPES) == set(get_args(Precision))
    assert DTYPES["bf16"].table() == "parameter float32 | compute bfloat16 | reduce float32 | optimizer float32"


def test_what_a_processor_cannot_do_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_in_half_width", lambda: False)
    assert "has no arithmetic in bfloat16" in DTYPES["bf16"].notes("cpu")[0]
    assert DTYPES["fp32"].notes("cpu") == DTYPES["float64"].notes("cpu") == DTYPES["bf16"].notes("cuda") == []
    monkeypatch.setattr(precision, "_in_half_width", lambda: True)
    assert DTYPES["bf16"].notes("cpu") == []


class Pair(NamedTuple):
    first: torch.Tensor
    second: str


def test_casting_reaches_into_what_a_module_takes() -> None:
    value = {"x": (torch.zeros(1), [torch.zeros(1, dtype=torch.int64), None]), "pair": Pair(torch.zeros(1), "s")}
    found = cast(value, torch.bfloat16)
    assert found["x"][0].dtype == torch.bfloat16
    assert found["x"][1][0].dtype == torch.int64
    assert found["pair"].first.dtype == torch.bfloat16
    assert found["pair"].second == "s"
