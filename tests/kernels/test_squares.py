"""Sums of squares against float64, interpreted: odd sizes and places, every dtype, tensors that move."""

from __future__ import annotations

import math

import pytest
import torch

from phalanx.kernels import choice
from phalanx.kernels.squares import KERNEL, SumOfSquares, suits
from tests.kernels.apart import runs

SIZES = (0, 1, 33, 4096, 32_768, 70_000)


def compare(device: str) -> None:
    """The kernel on a device, on fresh random numbers."""
    seed = torch.seed()
    choice.interpreted = device == "cpu"
    assert KERNEL.works(torch.device(device))
    squares = SumOfSquares()
    for turn in range(3):
        flat = torch.randn(2 * sum(SIZES) + 3, device=device) * 10 ** torch.empty(1, device=device).uniform_(-3, 3)
        tensors = [
            part.to(dtype)[turn % 2 :]
            for dtype, offset in ((torch.float32, 0), (torch.bfloat16, sum(SIZES)), (torch.float16, 1))
            for part in flat[offset : offset + sum(SIZES)].split(SIZES)
        ]
        tensors += [flat[:35].view(5, 7).t(), flat[1:7].view(1, 2, 3)]
        assert all(map(suits, tensors))
        right = torch.stack([tensor.double().square().sum() for tensor in tensors]).sum()
        found = squares.sum(tensors)
        assert found.dtype == torch.float64
        assert torch.allclose(found, right, rtol=1e-5), (seed, turn)
    for bad in (math.inf, math.nan):
        tensors[4][-1] = bad
        assert not math.isfinite(float(squares.sum(tensors)))
    assert not suits(torch.zeros(4, 6, device=device)[:, :3])
    assert not suits(torch.zeros(4, device=device, dtype=torch.float64))


def test_the_kernel_sums_squares() -> None:
    runs("import tests.kernels.test_squares as test; test.compare('cpu')", TRITON_INTERPRET="1")


def test_it_is_not_used_on_a_processor() -> None:
    assert not suits(torch.zeros(4))


@pytest.mark.gpu
def test_the_kernel_sums_squares_on_a_gpu() -> None:
    compare("cuda")
