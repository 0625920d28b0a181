"""Weights in 4 bits: the nearest values of bitsandbytes' table, in its order, and products with them."""

from __future__ import annotations

import pytest
import torch

from phalanx.kernels import nf4 as kernel
from phalanx.kernels.nf4 import BLOCK, CODE
from phalanx.models.nf4 import FourBits, dequantised, product, quantised


def test_values_of_the_table_come_back_and_halves_of_bytes_are_in_order() -> None:
    weight = torch.tensor(CODE).repeat(4).repeat(3, 1)
    bits = quantised(weight)
    assert torch.equal(dequantised(bits, (3, 64), torch.float32), weight)
    assert bits.packed[:3].tolist() == [0x01, 0x23, 0x45]
    assert bits.packed.dtype == torch.uint8
    assert bits.packed.numel() == weight.numel() // 2


@pytest.mark.parametrize("shape", [(512, 128), (7, 9), (300, 64)])
def test_the_nearest_value_is_taken(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = dequantised(quantised(weight), shape, torch.float32)
    flat = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    largest = flat.abs().amax(1, keepdim=True)
    nearest = torch.tensor(CODE)[(flat.unsqueeze(-1) / largest.unsqueeze(-1) - torch.tensor(CODE)).abs().argmin(-1)]
    expected = (nearest * largest).flatten()[: weight.numel()].view(shape)
    assert (found - expected).abs().max() < 0.02 * largest.max()  # what 8 bits leave of the blocks' scales
    assert (found - weight).square().mean().sqrt() < 0.12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_parts_of_a_weight_are_made_real_as_the_whole_is(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    bits, which = quantised(torch.randn(70, 100)), torch.randperm(110)
    expected = [dequantised(bits, (70, 100), dtype, blocks) for blocks in (None, which)]
    monkeypatch.setattr(kernel, "AT_ONCE", (128, 3 * BLOCK))
    for blocks, whole in zip((None, which), expected, strict=True):
        assert torch.equal(dequantised(bits, (70, 100), dtype, blocks), whole)


def test_it_takes_little_more_than_4_bits() -> None:
    bits = quantised(torch.randn(1024, 1024))
    assert sum(part.numel() * part.element_size() for part in bits) * 8 / 1024**2 < 4.2


def test_scales_that_are_all_alike_and_blocks_of_zeros() -> None:
    weight = torch.zeros(4, 64)
    weight[1, 3] = 2.0
    assert torch.allclose(dequantised(quantised(weight), (4, 64), torch.float32), weight, atol=0.02)
    assert torch.equal(dequantised(quantised(torch.zeros(2, 64)), (2, 64), torch.float32), torch.zeros(2, 64))


def test_a_product_and_its_gradient_are_those_of_the_whole_weight() -> None:
    bits = quantised(torch.randn(6, 10))
    weight = dequantised(bits, (6, 10), torch.float64)
    x = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        found = product(x, bits, (6, 10))
    assert torch.allclose(found, x @ weight.T)
    assert {t.dtype for t in kept} == {torch.uint8, torch.int8, torch.int32}
    found.square().sum().backward()
    own, x.grad = x.grad, None
    (x @ weight.T).square().sum().backward()
    assert torch.allclose(own, x.grad)


def test_it_is_made_of_whole_numbers() -> None:
    assert not any(part.is_floating_point() for part in FourBits(*quantised(torch.randn(8, 8))))


@pytest.mark.parametrize("shape", [(64, 128), (96, 200)])
def test_bits_are_those_of_bitsandbytes(shape: tuple[int, int]) -> None:
    """Bytes and scales of blocks are the same; scales kept in 8 bits are no further off than its own."""
    bnb = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed (the dev extra has it)")
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) / 50
    theirs, state = bnb.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    ours = quantised(weight)
    assert torch.equal(ours.packed, theirs.flatten())
    assert torch.equal(state.code, torch.tensor(CODE))
    flat = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    assert torch.equal(state.absmax, flat.abs().amax(1))
    narrow, twice = bnb.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4", compress_statistics=True)
    off = (bnb.dequantize_4bit(narrow, twice) - bnb.dequantize_4bit(theirs, state)).abs().max()
    assert (dequantised(ours, shape, torch.float32) - bnb.dequantize_4bit(theirs, state)).abs().max() <= off
