"""Collectives of activations in fewer bits: how many bytes they are, and that sums are not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.narrow import Narrow
from phalanx.parallel.communication.narrowed import (
    all_to_all,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from phalanx.parallel.communication.traffic import Traffic
from tests.ranks import Ranks

WIDTH = 12


def sent(kind: str, dtype: torch.dtype) -> list[int]:
    """Bytes of each collective."""
    group, narrow, found = Communicator(dist.group.WORLD, Traffic(), "tp"), Narrow(kind), []
    parts = torch.randn(group.size, 5, WIDTH, dtype=dtype)
    for collective in (
        lambda: start_all_gather(parts[0], group, narrow)(),
        lambda: start_reduce_scatter(parts, group, narrow)(),
        lambda: start_all_reduce(parts, group, narrow)(),
        lambda: all_to_all(parts, group, narrow),
    ):
        before = group.traffic.sent.total()
        assert collective().dtype == dtype
        found.append(group.traffic.sent.total() - before)
    return found


@pytest.mark.parametrize(("kind", "row"), [("exact", 4 * WIDTH), ("bf16", 2 * WIDTH), ("fp8", WIDTH + 4)])
def test_bytes(ranks: Ranks, kind: str, row: int) -> None:
    rows = [5, 5, 2 * 5, 5]
    for found in ranks(2, sent, kind, torch.float32):
        assert found == [count * row for count in rows]


def test_what_has_as_few_bits_is_sent_as_it_is(ranks: Ranks) -> None:
    assert ranks(2, sent, "bf16", torch.bfloat16) == ranks(2, sent, "exact", torch.bfloat16)


def summed() -> torch.Tensor:
    """Of numbers that 16 bits, or 8, can tell, and whose sum they cannot."""
    group = Communicator(dist.group.WORLD, Traffic(), "tp")
    parts = torch.full((group.size, 3, WIDTH), 256.0 if group.rank == 0 else 1.0)
    return torch.stack([start_reduce_scatter(parts, group, Narrow(kind))() for kind in ("bf16", "fp8")])


def test_sums_are_as_wide_as_what_is_computed(ranks: Ranks) -> None:
    for found in ranks(4, summed):
        assert (found == 259).all()
