"""Codes of 4 bits as numbers: by the table, whichever kernel makes them, and as one operator of the compiler's."""

from __future__ import annotations

import pytest
import torch

from phalanx.kernels.nf4 import BLOCK, CODE, widened


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_each_half_of_a_byte_is_a_value_times_its_blocks_scale(dtype: torch.dtype) -> None:
    packed = torch.randint(0, 256, (7 * BLOCK // 2,), dtype=torch.uint8)
    scale = torch.randn(7)
    expected = [
        CODE[half] * scale[i // (BLOCK // 2)] for i, byte in enumerate(packed) for half in divmod(int(byte), 16)
    ]
    assert torch.equal(widened(packed, scale, dtype), torch.stack(expected).to(dtype))


def test_it_is_an_operator_that_a_compiler_may_call() -> None:
    packed, scale = torch.randint(0, 256, (BLOCK,), dtype=torch.uint8), torch.randn(2)
    torch.library.opcheck(widened, (packed, scale, torch.bfloat16))


def test_of_nothing_it_makes_nothing() -> None:
    assert widened(torch.empty(0, dtype=torch.uint8), torch.empty(0), torch.float32).shape == (0,)
