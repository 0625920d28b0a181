"""How well queries find the texts that belong to them: nDCG, recall and the reciprocal rank of the first."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.data.search_rows import ABSENT

DEPTH = 10
"""How many of the texts found are looked at."""
RECALLS = (1, DEPTH)
TOGETHER = 1024
"""Queries that are compared with all texts at a time."""


def retrieval(embeddings: Tensor, ids: Tensor) -> dict[str, float]:
    """The measures of ``[rows, texts, width]``: each query among all other texts there, each of these counted once.

    ``ids`` says which texts are equal. What belongs to a query is what stands as a positive beside an equal one. Texts
    that are equally near stand in the order of the data.
    """
    documents: dict[int, int] = {}
    for index, number in enumerate(ids[:, 1:].flatten().tolist()):
        if number != ABSENT:
            documents.setdefault(number, index)
    place = {number: where for where, number in enumerate(documents)}
    corpus = F.normalize(embeddings[:, 1:].flatten(0, 1)[list(documents.values())].double(), dim=-1)
    wanted: dict[int, set[int]] = {}
    first: dict[int, int] = {}
    for row, (query, positive) in enumerate(ids[:, :2].tolist()):
        wanted.setdefault(query, set()).add(place[positive])
        first.setdefault(query, row)
    queries = F.normalize(embeddings[list(first.values()), 0].double(), dim=-1)
    nearest = [
        (part @ corpus.T).argsort(dim=1, descending=True, stable=True)[:, :DEPTH] for part in queries.split(TOGETHER)
    ]
    measures = [
        _measures(torch.tensor([float(text in own) for text in row], dtype=torch.float64), len(own))
        for row, own in zip(torch.cat(nearest).tolist(), wanted.values(), strict=True)
    ]
    return {name: sum(each[name] for each in measures) / len(measures) for name in measures[0]}


def _measures(hits: Tensor, relevant: int) -> dict[str, float]:
    """Of one query: which of the nearest texts belong to it, of so many that do."""
    gains = 1 / torch.log2(torch.arange(DEPTH).double() + 2)
    best = gains[: min(relevant, DEPTH)].sum()
    at = hits.nonzero().flatten().tolist()
    found = {
        f"ndcg_{DEPTH}": float((hits * gains[: len(hits)]).sum() / best),
        f"mrr_{DEPTH}": 1 / (at[0] + 1) if at else 0.0,
    }
    return found | {f"recall_{k}": float(hits[:k].sum()) / relevant for k in RECALLS}
