"""Who holds a weight, and sums among those who do."""

from __future__ import annotations

import torch
import torch.distributed as dist

import phalanx
from phalanx import Layout
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.traffic import Traffic
from phalanx.parallel.weights.holding import _sum_among
from tests.layouts import task_for
from tests.ranks import Ranks


def sums() -> list[list[float]]:
    rank, group = dist.get_rank(), Communicator(dist.group.WORLD, Traffic())
    everybody, some, own = torch.full((2,), rank + 1.0), torch.full((3,), 10.0 * (rank + 1)), torch.tensor([7.0])
    parts = [(everybody, [0, 1, 2, 3]), (own, [rank])]
    if rank in (0, 2):
        parts.insert(1, (some, [0, 2]))
    _sum_among(parts, own, group)
    return [everybody.tolist(), some.tolist(), own.tolist()]


def test_parts_are_summed_among_their_holders(ranks: Ranks) -> None:
    for rank, (everybody, some, own) in enumerate(ranks(4, sums)):
        assert everybody == [10.0, 10.0]
        assert some == ([40.0] * 3 if rank in (0, 2) else [10.0 * (rank + 1)] * 3)
        assert own == [7.0]


def counted(layout: Layout) -> dict[str, bool]:
    with phalanx.Engine(task_for(layout), layout, device="cpu") as engine:
        return {name: engine.spread.holding.counts(name) for name in engine.spread.weights}


def test_every_weight_counts_once_a_shard(ranks: Ranks) -> None:
    """Over ``tp`` and ``pp`` a part that several ranks hold is counted by the first of them."""
    layout = Layout(tp=2, pp=2, micro_batch=8)
    answers = ranks(4, counted, layout)
    counts = {name: sum(answer.get(name, False) for answer in answers) for answer in answers for name in answer}
    assert counts["embedding.weight"] == 2  # in two parts over tp, on both stages
    assert counts["norm.weight"] == counts["scalar"] == 1
    assert counts["blocks.0.attention.q_proj.weight"] == 2
    assert counts["blocks.0.attention.k_proj.weight"] == 1  # one key-value head, which both hold
