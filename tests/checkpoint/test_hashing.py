"""Hashes of tensors: the same however they are cut, another for every bit and every place."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from phalanx.checkpoint.hashing import LENGTH, hashed, joined
from phalanx.parallel.weights.boxes import Box

SHAPES = [(), (1,), (7,), (5, 6), (3, 4, 5), (2, 3, 3, 3), (300, 2), (2, 300)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]


def made(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul(50).abs().to(dtype)


def whole(tensor: Tensor) -> int:
    return hashed(tensor, Box.whole(tensor), tensor.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_division_gives_the_same_sum(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = made(shape, dtype)
    before, expected = tensor.clone(), whole(tensor)
    for parts in (2, 3):
        spans = [torch.arange(size).tensor_split(parts) for size in shape]
        total = 0
        for chosen in itertools.product(*spans):
            if all(len(span) for span in chosen):
                box = Box(tuple(int(span[0]) for span in chosen), tuple(len(span) for span in chosen))
                view = tensor[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))]
                total += hashed(view, box, shape)
        assert total % (1 << 64) == expected, parts
    assert torch.equal(tensor, before), "nothing is changed by being hashed"


def test_long_rows_are_hashed_in_parts() -> None:
    tensor = made((2 * LENGTH + 3,))
    assert sum(hashed(tensor[a:b], Box((a,), (b - a,)), tensor.shape) for a, b in ((0, 5), (5, len(tensor)))) % (
        1 << 64
    ) == whole(tensor)
    assert whole(tensor) != whole(tensor.flip(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8], ids=str)
def test_every_bit_counts(dtype: torch.dtype) -> None:
    tensor = made((6, 5), dtype)
    flat = tensor.view(-1).view(torch.uint8)
    seen = {whole(tensor)}
    for byte, bit in itertools.product(range(len(flat)), range(8)):
        flat[byte] ^= 1 << bit
        seen.add(whole(tensor))
        flat[byte] ^= 1 << bit
    assert len(seen) == 1 + 8 * len(flat)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_place_counts(dtype: torch.dtype) -> None:
    """Numbers that differ in their sign alone have changed places, which a sum of products could miss."""
    tensor = torch.ones(4, 5, dtype=dtype)
    seen = set()
    for place in range(tensor.numel()):
        tensor.view(-1)[place] = -1
        seen.add(whole(tensor))
        tensor.view(-1)[place] = 1
    assert len(seen) == tensor.numel()
    assert whole(made((4, 4))) != whole(made((4, 4)).t().contiguous())
    assert whole(torch.zeros(3)) == whole(torch.zeros(4)), "lengths are told apart by"
    assert joined([("a", "float32", (3,), 0)]) != joined([("a", "float32", (4,), 0)])


def test_many_are_joined_whatever_their_order() -> None:
    tensors = [("a", "float32", (3,), 5), ("b", "float32", (2, 3), 6)]
    assert joined(tensors) == joined(reversed(tensors))
    for changed in (("c", "float32", (3,), 5), ("a", "float64", (3,), 5), ("a", "float32", (3,), 4)):
        assert joined([changed, tensors[1]]) != joined(tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_gives_the_same(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        assert whole(made(shape, dtype).cuda()) == whole(made(shape, dtype))
