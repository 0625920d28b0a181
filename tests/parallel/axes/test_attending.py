"""Each way in which models call attention leads to the same method, with what it was called with."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.kernels.packed_attention import packed_attention
from phalanx.parallel.axes.attending import Attend, Attending


class Doubling(Attending):
    """Attends to values twice as large."""

    def __init__(self) -> None:
        self.ranks, self.rank = 1, 0
        self.seen: list[tuple[bool, int, bool]] = []

    def attention(
        self, attend: Attend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool,
        *, time: int, draws: bool,
    ) -> Any:  # fmt: skip
        self.seen.append((causal, time, draws))
        return attend(query, key, 2 * value, mask, causal)


def test_torchs_own_however_it_is_called() -> None:
    plain, doubling = F.scaled_dot_product_attention, Doubling()
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    grouped = 2 * plain(query, key, value, is_causal=True, enable_gqa=True)
    for found in (
        doubling.sdpa(plain, query, key, value, is_causal=True, enable_gqa=True),
        doubling.sdpa(plain, query, key, value, None, 0.0, True),
        doubling.sdpa(plain, query, key=key, value=value, attn_mask=mask),
    ):
        torch.testing.assert_close(found, grouped)
    doubling.sdpa(plain, query, query, query, dropout_p=0.5)
    assert doubling.seen == [(True, -2, False), (True, -2, False), (False, -2, False), (False, -2, True)]


def test_that_of_packed_documents() -> None:
    block, doubling = nn.Sequential(nn.Identity(), nn.Identity()), Doubling()
    block[1].packed_attention = packed_attention
    doubling.reach(block)
    assert not hasattr(block[0], "packed_attention")
    query, starts = torch.randn(1, 2, 6, 8), torch.tensor([0, 0, 0, 3, 3, 3], dtype=torch.int32).view(1, 1, 1, 6)
    found = block[1].packed_attention(query, query, query, starts)
    torch.testing.assert_close(found, 2 * packed_attention(query, query, query, starts))
