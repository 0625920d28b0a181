"""Kept keys: what tokens see of those before them."""

from __future__ import annotations

import torch
from torch import nn

from phalanx.attention import document_mask
from phalanx.key_values import KeyValues


def test_tokens_look_back_in_their_document_and_at_no_padding() -> None:
    documents = torch.tensor([[-1, -1, 0, 0, 0], [0, 0, 0, 1, 1]])
    whole, kept = document_mask(documents), KeyValues()
    assert torch.equal(kept.mask(documents[:, :3]), whole[:, :, :3, :3])
    assert torch.equal(kept.mask(documents[:, 3:4]), whole[:, :, 3:4, :4])
    assert torch.equal(kept.mask(documents[:, 4:]), whole[:, :, 4:])
    assert whole[0].any(-1).all()  # padding sees itself, or its softmax would be of nothing


def test_each_attention_has_its_own() -> None:
    first, second, kept = nn.Identity(), nn.Identity(), KeyValues()
    keys = torch.randn(2, 3, 4, 5)
    for attention, sign in ((first, 1), (second, -1)):
        kept.extended(attention, sign * keys[:, :, :3], keys[:, :, :3])
    for attention, sign in ((first, 1), (second, -1)):
        key, value = kept.extended(attention, sign * keys[:, :, 3:], keys[:, :, 3:])
        assert torch.equal(key, sign * keys)
        assert torch.equal(value, keys)
