from __future__ import annotations

import torch

from phalanx.kernels import blockwise, blockwise_cpu
from phalanx.kernels.blockwise_choice import fastest, same


def test_a_proofs_numbers_are_the_twins() -> None:
    assert fastest(torch.zeros(1, dtype=torch.float64)) is blockwise


def test_a_processor_has_what_is_compiled() -> None:
    expected = blockwise if blockwise_cpu.library() is None else blockwise_cpu
    assert fastest(torch.zeros(1)) is expected
    assert all(same(expected, bits, "cpu") for bits in blockwise.BLOCKS)
