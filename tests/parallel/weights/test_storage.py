"""When a rank has all of a weight twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import phalanx
from phalanx.recipes.gpt import GPT

SMALL = GPT(width=32, layers=1, global_batch=4, megabytes=0.05, length=16)


@pytest.mark.parametrize(
    ("precision", "layout", "twice"),
    [("bf16", "dp=1", True), ("fp32", "dp=1", False), ("bf16", "dp=1,offload=params", False)],
)
def test_a_rank_has_a_weight_twice_where_it_computes_narrower(precision: str, layout: str, twice: bool) -> None:
    task = replace(SMALL, precision=precision)  # type: ignore[arg-type]
    with phalanx.Engine(task, layout, device="cpu") as engine:
        assert {storage.copies for storage in engine.spread.storages.values()} == {twice}
        weights = engine.spread.weights.values()
        assert all((weight.full.dtype == torch.bfloat16) == (precision == "bf16") for weight in weights)
