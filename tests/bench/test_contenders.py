"""Contenders train: every loss that is told falls when the same tokens come again."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch

from phalanx.bench.contenders import CONTENDERS, Setting
from tests.bench.test_shape import SMALL

INSTALLED = [name for name, one in CONTENDERS.items() if all(map(importlib.util.find_spec, one.needs))]


def test_all_but_torchtitan_are_installed_with_the_dev_extra() -> None:
    assert {*CONTENDERS} - {*INSTALLED} <= {"torchtitan"}


@pytest.mark.parametrize("name", INSTALLED)
def test_it_learns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    contender = CONTENDERS[name]
    tokens = torch.randint(0, SMALL.vocabulary, (2, 17), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(Setting, "batch", lambda self: (tokens[:, :-1], tokens[:, 1:]))

    def loss(found: Any) -> float:
        return float(getattr(found, "loss", found))

    for step in contender.steps(Setting(SMALL, "cpu", "fp32")):
        losses = [loss(step()) for _ in range(20)]
        spread = 0.5 if name == "torchtitan" else 0.0  # half the variance of its first logits, which is one
        assert losses[0] == pytest.approx(math.log(SMALL.vocabulary) + spread, abs=0.2)
        assert min(losses) < losses[0]
