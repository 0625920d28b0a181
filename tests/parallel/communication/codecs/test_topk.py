from __future__ import annotations

import torch

from phalanx.parallel.communication.codecs.topk import TopK


def test_the_largest_are_sent_and_the_rest_is_left() -> None:
    codec = TopK(1)
    x, owed = torch.randn(2, 4 * codec.block)
    sent, left, found = torch.empty(codec.size(len(x), x.dtype), dtype=torch.uint8), x.clone(), x.clone()
    codec.encode(x, sent, owed, left)
    codec.decode(sent[None], found)
    assert len(sent) == 4 * 10 * 6
    assert torch.equal(found + left, x + owed)
    assert not (found * left).any()
    by_block = found.view(4, -1)
    assert by_block.count_nonzero(1).tolist() == [10] * 4
    assert (by_block.abs().amax(1) > left.view(4, -1).abs().amax(1)).all()
    codec.decode(torch.stack([sent, sent]), left)
    assert torch.equal(left, 2 * found)


def test_what_is_not_finite_is_sent() -> None:
    codec = TopK(0.1)
    x = torch.ones(codec.block)
    x[7] = torch.nan
    sent = torch.empty(codec.size(len(x), x.dtype), dtype=torch.uint8)
    codec.encode(x, sent)
    codec.decode(sent[None], x)
    assert x[7].isnan()
