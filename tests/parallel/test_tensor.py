"""Tensor parallelism on models that were not written for it, and what it refuses. (Parity: tests/train.)"""

from __future__ import annotations

import pytest

import phalanx
from phalanx import Layout
from phalanx.recipes.gpt import GPT
from tests.hugging_face import CausalLanguageModel
from tests.parity import TOLERANCE, Trace, difference, reference, spread_run
from tests.ranks import RankFailed, Ranks

EQUAL = ("llama", "qwen2", "qwen3", "gpt2", "mistral", "gemma2", "gpt-neox", "mixtral")
LAYOUTS = ("fsdp=2,tp=2",)


def run_all(kind: str) -> list[Trace]:
    return [spread_run(CausalLanguageModel(kind=kind, steps=2), Layout.parse(layout)) for layout in LAYOUTS]


@pytest.mark.parametrize("kind", EQUAL)
def test_hugging_face_models_train_like_one_device(ranks: Ranks, kind: str) -> None:
    expected = reference(CausalLanguageModel(kind=kind, steps=2))
    for layout, trace in zip(LAYOUTS, ranks(4, run_all, kind)[0], strict=True):
        error, where = difference(trace, expected)
        assert error < TOLERANCE, f"{layout}: {error:.1e} in {where}"


@pytest.mark.parametrize(("kind", "words"), [
    ("bloom", "self_attention cannot work with its part under tp=2: its code fixes sizes"),
    ("falcon", "query_key_value gives 36 features, not query, key and value of 4 heads of 6"),
])  # fmt: skip
def test_models_that_cannot_be_cut_are_refused(ranks: Ranks, kind: str, words: str) -> None:
    with pytest.raises(RankFailed, match=words):
        ranks(2, spread_run, CausalLanguageModel(kind=kind), Layout(tp=2))


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
