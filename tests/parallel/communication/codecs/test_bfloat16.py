from __future__ import annotations

import torch

from phalanx.parallel.communication.codecs.bfloat16 import Bfloat16


def test_sums_are_wide() -> None:
    codec, rows = Bfloat16(), torch.tensor([[1.0, 3.0], [2.0**-12, 2.0**-9]])
    sent = torch.empty(2, codec.size(2, torch.float32), dtype=torch.uint8)
    for row, out in zip(rows, sent, strict=True):
        codec.encode(row, out)
    total = torch.empty(2)
    codec.decode(sent, total)
    assert torch.equal(total, rows.sum(0))  # in bfloat16 the small ones would be gone
