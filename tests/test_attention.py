"""Attention inside packed documents, for models of one's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from phalanx.attention import are_starts, document_mask, kept_apart, packed_attention

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2], [4, 4, 4, 4, 4, -1]])


@pytest.mark.parametrize("causal", [True, False])
def test_where_documents_begin_says_what_a_mask_says(causal: bool) -> None:
    q, k = torch.randn(2, 4, 6, 8, dtype=torch.float64), torch.randn(2, 2, 6, 8, dtype=torch.float64)
    starts, mask = kept_apart(DOCUMENTS, q, 8, causal), document_mask(DOCUMENTS, causal)
    assert are_starts(starts)
    assert not are_starts(mask)
    expected = F.scaled_dot_product_attention(q, k, k, attn_mask=mask, enable_gqa=True)
    assert torch.allclose(packed_attention(q, k, k, starts, causal), expected)


def test_what_begins_twice_has_a_mask() -> None:
    documents = torch.tensor([[0, 1, 0]])
    assert torch.equal(kept_apart(documents, torch.zeros(1), 8), document_mask(documents))
