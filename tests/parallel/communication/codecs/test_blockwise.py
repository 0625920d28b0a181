from __future__ import annotations

import pytest
import torch

from phalanx.kernels import blockwise
from phalanx.parallel.communication.codecs.blockwise import UNEVEN, Blockwise


@pytest.mark.parametrize("bits", [8, 4])
def test_no_sum_of_codes_lies_half_way_between_two(bits: int) -> None:
    """Else its last bit would decide, and one device could not say what many do.

    A sum of codes is the same share of the largest sum on every rank's scale only if it is so many of so many codes.
    """
    full = blockwise.FULL[bits] - UNEVEN
    of = torch.arange(1.0, blockwise.FULL[bits] + 1, dtype=torch.float64)
    shares = full * of[:, None] / of
    shares = shares[shares <= full]
    assert ((shares - shares.floor() - 0.5).abs() > 1e-6).all()
    assert round(full) == blockwise.FULL[bits]


def test_few_bits_owe_and_more_do_not() -> None:
    assert (Blockwise(8).feedback, Blockwise(4).feedback) == (False, True)
    assert Blockwise(8).size(1024, torch.float32) == 1024 + 4 * 4
    assert Blockwise(4).size(1024, torch.float32) == 512 + 8 * 4


def test_a_mean_is_of_what_is_no_padding() -> None:
    codec = Blockwise(1)
    assert Blockwise(4).for_rows(lambda: torch.zeros(0)).counts is None
    assert codec.size(2048, torch.float32) == 2 * (128 + 4)
    own, x = codec.for_rows(lambda: torch.tensor([1024, 2], dtype=torch.int32)), torch.zeros(1024)
    x[:2] = torch.tensor([3.0, -5.0])
    sent, found = torch.empty(codec.size(1024, x.dtype), dtype=torch.uint8), torch.empty_like(x)
    own.encode(x, sent, at=1024)
    own.decode(sent[None], found, at=1024)
    assert found[:3].tolist() == [4, -4, 0]
    codec.encode(x, sent)
    codec.decode(sent[None], found)
    assert found[0] == 8 / 1024
