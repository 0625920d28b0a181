"""The kernel is its twin, to the bit: interpreted on a processor, compiled where there is a GPU."""

from __future__ import annotations

import pytest

from phalanx.kernels.blockwise_choice import same
from tests.kernels.apart import runs


def compare(device: str) -> None:
    from phalanx.kernels import blockwise_triton

    for bits in (8, 4, 1):
        assert same(blockwise_triton, bits, device), bits


def test_it_is_its_twin() -> None:
    runs("from tests.kernels.test_blockwise_triton import compare; compare('cpu')", TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_it_is_its_twin_on_a_gpu() -> None:
    compare("cuda")
