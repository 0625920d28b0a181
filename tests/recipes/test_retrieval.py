"""Measures of retrieval, against numbers found by hand."""

from __future__ import annotations

import math

import pytest
import torch

from phalanx.data.search_rows import ABSENT
from phalanx.recipes.retrieval import retrieval


def on_a_circle(*degrees: float) -> torch.Tensor:
    turns = torch.tensor(degrees) * math.pi / 180
    return torch.stack([turns.cos(), turns.sin()], dim=-1)


def test_measures_are_those_found_by_hand() -> None:
    """The first query finds its text at once, the second after two others, of which one is a negative."""
    embeddings = torch.stack([on_a_circle(0, 1, 88), on_a_circle(90, 95, 3)])
    found = retrieval(embeddings, torch.tensor([[0, 1, 2], [3, 4, ABSENT]]))
    assert found["recall_1"] == 0.5
    assert found["recall_10"] == 1.0
    assert found["mrr_10"] == pytest.approx((1 + 1 / 2) / 2)
    assert found["ndcg_10"] == pytest.approx((1 + 1 / math.log2(3)) / 2)


def test_what_is_beyond_the_tenth_is_not_found() -> None:
    rows = [on_a_circle(0, 90)] + [on_a_circle(180 + n, n) for n in range(1, 12)]
    ids = torch.arange(24).view(12, 2)
    found = retrieval(torch.stack(rows)[:1], ids[:1])
    assert found["recall_10"] == 1.0, "nothing else is there"
    found = retrieval(torch.stack(rows), ids)
    assert found["mrr_10"] < 1 / 12 + 1 / 20


def test_equal_queries_and_texts_count_once() -> None:
    """One query with two texts: the best order has both first."""
    embeddings = torch.stack([on_a_circle(0, 1), on_a_circle(0, 5), on_a_circle(90, 1)])
    found = retrieval(embeddings, torch.tensor([[0, 1], [0, 2], [3, 1]]))
    assert found["recall_1"] == pytest.approx((0.5 + 0.0) / 2)
    assert found["ndcg_10"] == pytest.approx((1 + 1 / math.log2(3)) / 2)
    assert found["recall_10"] == 1.0
