"""Tensor parallelism beside training steps. (Parity: tests/train and test_hugging_face.)"""

from __future__ import annotations

import pytest

import phalanx
from phalanx import Layout
from phalanx.recipes.gpt import GPT
from tests.ranks import Ranks


def evaluate(layout: str) -> dict[str, float]:
    task = GPT(
        width=16, layers=2, heads=2, kv_heads=1, length=16, megabytes=0.1, steps=1, precision="float64", dropout=0.1
    )
    with phalanx.Engine(task, Layout.parse(layout), device="cpu") as engine:
        for batch in engine.batches():
            engine.step(batch)
        return engine.evaluate()


def test_evaluation_counts_every_sample_once(ranks: Ranks) -> None:
    alone = evaluate("dp=1")
    for found in ranks(4, evaluate, "dp=2,tp=2"):
        assert found == pytest.approx(alone, rel=1e-12)
