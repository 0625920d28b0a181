"""Moments in fewer bits: codes come back as they are, rounding loses nothing on average, what is no number stays so."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from phalanx import counter
from phalanx.kernels.moments import DTYPES, Moments, narrowed, widened

SPACING = {"bfloat16": 2**-7, "float8": 2**-2}
"""Of neighbours, at most, as a share of themselves."""


def words(*shape: int, key: int = 1) -> Tensor:
    return counter.box_words(key, shape, ((0,) * len(shape), shape), torch.device("cpu"))


def through(first: Tensor, second: Tensor, moments: Moments, drawn: Tensor) -> tuple[Tensor, Tensor]:
    kept = narrowed(first, second, moments, drawn)
    assert [tensor.dtype for tensor in kept] == 2 * [DTYPES[moments]]
    return widened(*kept, torch.float64)


@pytest.mark.parametrize("moments", ["bfloat16", "float8"])
def test_rounding_loses_nothing_on_average(moments: Moments) -> None:
    source, times = torch.Generator().manual_seed(0), 20_000
    roots = torch.exp2(30 * torch.rand(60, generator=source) - 26)
    ratios = torch.randn(60, generator=source) * torch.exp2(6 * torch.rand(60, generator=source) - 5)
    first, second = ratios * roots, roots.square()
    found = through(first.expand(times, 60), second.expand(times, 60), moments, words(times, 60))
    for one, right in zip(found, (first.double(), second.double()), strict=True):
        off = (one.mean(0) - right).abs()
        noise = one.std(0) / math.sqrt(times)
        assert bool((off <= 5 * noise + 1e-5 * right.abs()).all())
        assert one.unique(dim=0).shape[0] > 1
    assert bool(((found[1] - second).abs() <= SPACING[moments] * second).all())  # a neighbour, never further
    near = SPACING[moments] * first.abs() + (0 if moments == "bfloat16" else 2**-11 * roots)
    assert bool(((found[0] - first).abs() <= near).all())


def test_every_code_comes_back_as_it_is() -> None:
    first = torch.arange(256, dtype=torch.uint8).repeat_interleave(255)
    second = torch.arange(255, dtype=torch.uint8).repeat(256)
    values = widened(first, second, torch.float32)
    for drawn in (0, -1, 12345678):
        codes = narrowed(*values, "float8", torch.full(first.shape, drawn, dtype=torch.int32))
        assert torch.equal(codes[1], second)
        assert torch.equal(codes[0].where(first != 128, first), first)  # there is one zero
    assert bool((values[1].view(256, 255).diff(dim=1) > 0).all())
    assert float(values[1].max()) == 1.5 * 2**9
    assert float(values[1][1]) == 2**-55


@pytest.mark.parametrize("moments", ["bfloat16", "float8"])
def test_what_is_no_number_stays_none_and_zero_stays_zero(moments: Moments) -> None:
    odd = torch.tensor([0x7FFFFFFF, 0x7FC00000, -0x400000], dtype=torch.int32).view(torch.float32)  # kinds of NaN
    bad = torch.cat([odd, torch.tensor([math.inf])])
    for drawn in (0, -1):
        _, second = through(bad, bad, moments, torch.full((4,), drawn, dtype=torch.int32))
        assert not second.isfinite().any()
        zero, none = through(torch.zeros(4), torch.zeros(4), moments, torch.full((4,), drawn, dtype=torch.int32))
        assert not zero.any()
        assert not none.any()


def test_what_is_too_large_is_the_largest() -> None:
    first, second = torch.tensor([1e6, -1e6]), torch.full((2,), 1e9)
    found = through(first, second, "float8", torch.zeros(2, dtype=torch.int32))
    assert found[1].tolist() == [1.5 * 2**9] * 2
    assert found[0].tolist() == [120.0 * 2**4, -120.0 * 2**4]


def test_wide_moments_are_never_the_same_memory() -> None:
    first, second = torch.rand(2, 3, dtype=torch.float64)
    found = widened(first, second, torch.float64)
    assert torch.equal(found[0], first)
    assert found[0].data_ptr() != first.data_ptr()
    assert found[1].data_ptr() != second.data_ptr()
