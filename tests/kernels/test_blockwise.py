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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_bit_says_the_sign_and_the_mean_of_the_rest(dtype: torch.dtype) -> None:
    x = torch.randn(3 * BLOCKS[1], dtype=dtype, generator=torch.Generator().manual_seed(0))
    found = decoded(coded(x, 1)[None], 1, x)
    assert torch.equal(found.sign(), x.sign())
    blocks = found.view(-1, BLOCKS[1]).abs()
    assert torch.allclose(blocks, x.view(-1, BLOCKS[1]).abs().mean(1, keepdim=True).expand_as(blocks))
    owed, left = torch.randn_like(x), torch.empty_like(x)
    out = coded(x + owed, 1)
    again = torch.empty_like(out)
    encode(x, 1, FULL[1], again, owed, left)
    assert torch.equal(out, again)
    assert torch.equal(left, (x + owed) - decoded(out[None], 1, x))
    assert torch.equal(decoded(torch.stack([out, out]), 1, x), 2 * decoded(out[None], 1, x))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bit_keeps_what_is_not_finite(bad: float) -> None:
    x = torch.ones(2 * BLOCKS[1])
    x[3] = bad
    found = decoded(coded(x, 1)[None], 1, x)
    assert not found[: BLOCKS[1]].isfinite().any()
    assert torch.equal(found[BLOCKS[1] :], x[BLOCKS[1] :])
    assert not decoded(coded(torch.zeros(BLOCKS[1]), 1)[None], 1, x[: BLOCKS[1]]).any()


def test_one_bit_leaves_what_does_not_count() -> None:
    x, counts = torch.zeros(2 * BLOCKS[1]), torch.tensor([3, 0], dtype=torch.int32)
    x[:3] = torch.tensor([1.0, -2.0, 6.0])
    out, left, found = coded(x, 1), torch.ones_like(x), torch.empty_like(x)
    encode(x, 1, FULL[1], out, torch.zeros_like(x), left, counts)
    decode(out[None], 1, found, counts)
    assert found[:3].tolist() == [3, -3, 3]
    assert left[:3].tolist() == [-2, 1, 3]
    assert not left[3:].any()
    assert not found[3:].any()
