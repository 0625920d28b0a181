"""What a kernel draws, reads and writes is what the plain twin does, to the bit, on fresh random numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from phalanx import counter
from phalanx.kernels import moments as plain
from tests.kernels.apart import runs

SIZE = 2048


def compare(device: str) -> None:
    from tests.kernels.narrowing import draw, narrow

    seed, where = torch.seed(), torch.device(device)
    key = counter.key(seed)
    drawn = torch.empty(SIZE, dtype=torch.int32, device=device)
    for number, first in ((1, 0), (2**31 - 1, 77), (3, 2**40 + 1)):
        draw[(1,)](torch.tensor([key], device=device), drawn, first, number, SIZE=SIZE)
        own = counter.box_words(counter.nth(key, number), (SIZE,), ((first,), (2**41,)), where)
        assert torch.equal(drawn, own), (seed, number)
    m, v = numbers(device)
    short = torch.empty(2, SIZE, dtype=torch.bfloat16, device=device)
    codes = torch.empty(2, SIZE, dtype=torch.uint8, device=device)
    wide = torch.empty(2, SIZE, device=device)
    narrow[(1,)](m, v, drawn, short, codes, wide, SIZE=SIZE)
    for found, twin in zip(short, plain.narrowed(m, v, "bfloat16", drawn), strict=True):
        assert torch.equal(found.view(torch.int16)[3:], twin.view(torch.int16)[3:]), seed
        assert torch.equal(found.isnan(), twin.isnan()), seed
    assert torch.equal(codes[:, 3:], torch.stack(plain.narrowed(m, v, "float8", drawn))[:, 3:]), seed
    for found, twin in zip(wide, plain.widened(*codes, torch.float32), strict=True):
        assert torch.equal(found.nan_to_num(), twin.nan_to_num()), seed
    assert codes[1, :3].tolist() == [255, 255, 255]


def numbers(device: str) -> tuple[Tensor, Tensor]:
    """Moments of all sizes; first some that are none, and zeros."""
    roots = torch.exp2(50 * torch.rand(SIZE, device=device) - 38)
    first, second = roots * torch.randn(SIZE, device=device) * 2, roots.square()
    second[:5] = torch.tensor([math.nan, math.inf, math.nan, 0.0, 1e30], device=device)
    first[:5] = torch.tensor([math.nan, -math.inf, 1.0, 0.0, -1e15], device=device)
    return first, second


def test_the_kernel_is_its_twin() -> None:
    runs("import tests.kernels.test_moments_triton as test; test.compare('cpu')", TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_the_kernel_is_its_twin_on_a_gpu() -> None:
    compare("cuda")


def constants() -> None:
    from phalanx.kernels import moments_triton as kernels

    own = kernels.STRIDE, kernels.CALL, kernels.MIX_FIRST, kernels.MIX_SECOND
    assert [constant.value for constant in own] == [counter.GAMMA, counter.CALL, counter.FIRST, counter.SECOND]


def test_the_mixer_is_the_counters() -> None:
    runs("import tests.kernels.test_moments_triton as test; test.constants()")
