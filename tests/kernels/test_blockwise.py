"""Blocks of codes: what is said, what is left, and what is not finite."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from phalanx.kernels.blockwise import BLOCKS, FULL, block_bytes, decode, encode

BOTH = pytest.mark.parametrize("bits", [8, 4])


def coded(x: Tensor, bits: int, full: float = 0.0) -> Tensor:
    out = torch.empty(len(x) // BLOCKS[bits] * block_bytes(bits, x.dtype), dtype=torch.uint8)
    encode(x, bits, full or FULL[bits], out)
    return out


def decoded(rows: Tensor, bits: int, like: Tensor) -> Tensor:
    out = torch.empty_like(like)
    decode(rows, bits, out)
    return out


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_come_back_to_half_a_step(bits: int, dtype: torch.dtype) -> None:
    x = torch.randn(4 * BLOCKS[bits], dtype=dtype, generator=torch.Generator().manual_seed(0))
    found = decoded(coded(x, bits)[None], bits, x)
    step = x.view(-1, BLOCKS[bits]).abs().amax(1, keepdim=True) / FULL[bits]
    assert ((found - x).view(-1, BLOCKS[bits]).abs() <= 0.5001 * step).all()
    assert torch.equal(decoded(coded(found, bits)[None], bits, x), found) or bits == 8  # codes stay codes
    assert torch.allclose(found.view(-1, BLOCKS[bits]).abs().amax(1), x.view(-1, BLOCKS[bits]).abs().amax(1))


@BOTH
def test_what_is_owed_is_added_and_what_is_left_is_given(bits: int) -> None:
    x, owed = torch.randn(2, 2 * BLOCKS[bits])
    out, left = coded(x, bits), torch.empty_like(x)
    encode(x, bits, FULL[bits], out, owed, left)
    assert torch.equal(out, coded(x + owed, bits))
    assert torch.equal(left, (x + owed) - decoded(out[None], bits, x))
    encode(x, bits, FULL[bits], out, owed, owed)  # in its place
    assert torch.equal(owed, left)


@BOTH
def test_rows_are_summed_in_their_order(bits: int) -> None:
    rows = torch.randn(3, 2 * BLOCKS[bits])
    bytes_ = torch.stack([coded(row, bits) for row in rows])
    one = [decoded(each[None], bits, rows[0]) for each in bytes_]
    assert torch.equal(decoded(bytes_, bits, rows[0]), one[0] + one[1] + one[2])


@BOTH
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_spoils_its_block_alone(bits: int, bad: float) -> None:
    x = torch.ones(2 * BLOCKS[bits])
    x[3] = bad
    found = decoded(coded(x, bits)[None], bits, x)
    assert not found[: BLOCKS[bits]].isfinite().any()
    assert torch.equal(found[BLOCKS[bits] :], x[BLOCKS[bits] :])


@BOTH
def test_next_to_nothing_is_nothing(bits: int) -> None:
    x = torch.cat([torch.zeros(BLOCKS[bits]), torch.full((BLOCKS[bits],), 1e-40)])
    assert not decoded(coded(x, bits)[None], bits, x).any()
