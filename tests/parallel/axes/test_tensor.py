"""Tensor parallelism beside training steps. (Parity: tests/train and test_hugging_face.)"""

from __future__ import annotations

from functools import partial

import pytest

import phalanx
from phalanx import Layout
from phalanx.prove.reference.activations import round_activations
from phalanx.recipes.gpt import GPT
from tests.parity import TOLERANCE, HostileLanguage, Mixture, Trace, difference, reference, sent_along, spread_run
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


def spread(task: phalanx.Task, layout: str) -> Trace:
    return spread_run(task, Layout.parse(layout))


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (HostileLanguage(), "tp=2,activations=bf16"),
        (HostileLanguage(heads=8, kv_heads=2), "tp=4,activations=fp8"),
        (Mixture(steps=2), "tp=2,activations=fp8"),  # whose stream is whole on each rank
        (HostileLanguage(), "fsdp=2,tp=2,recompute=full,activations=fp8"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_in_fewer_bits_it_is_what_one_device_rounds(ranks: Ranks, task: HostileLanguage, text: str) -> None:
    layout = Layout.parse(text)
    expected = reference(task, observe=partial(round_activations, task, layout))
    error, where = difference(ranks(layout.world, spread, task, text)[0], expected)
    assert error < TOLERANCE, where
    assert difference(reference(task), expected)[0] > 1e-3


@pytest.mark.parametrize("experts", [0, 2])
def test_fewer_bytes(ranks: Ranks, experts: int) -> None:
    """In blocks of a feed-forward and attention; with experts of attention alone, whose sums go to all ranks."""
    task = GPT(
        width=16, layers=2, heads=2, length=8, global_batch=4, megabytes=0.1, steps=2, precision="fp32", experts=experts
    )
    found = {kind: ranks(2, sent_along, "tp", task, f"tp=2,activations={kind}")[0] for kind in ("exact", "bf16", "fp8")}
    containers, passes = 2 * (1 if experts else 2), 4  # in and out, forward and back; of a sum to all, both ways twice
    rows = containers * passes * 4 * 8 // 2  # a rank's tokens
    assert found["exact"] - found["bf16"] == rows * (4 * 16 - 2 * 16)
    assert found["exact"] - found["fp8"] == rows * (4 * 16 - (16 + 4))
