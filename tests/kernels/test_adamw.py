"""Adam in one pass against torch's own, interpreted: odd sizes and places, every dtype, weights at different steps."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from phalanx.kernels import choice
from phalanx.kernels.adamw import KERNEL, Hyperparameters, OnePass, Updated
from tests.kernels.apart import runs

SIZES = (1, 16, 33, 1024, 8192, 20_000)
BETAS, TINY, FACTOR = (0.9, 0.9999), 1e-6, 0.37


def compare(device: str) -> None:
    """Kernels on a device and torch's Adam in float64, on fresh random numbers."""
    seed = torch.seed()
    choice.interpreted = device == "cpu"
    assert KERNEL.works(torch.device(device))
    for dtype, copied, decoupled in product((torch.float32, torch.bfloat16), (True, False), (True, False)):
        told = seed, dtype, copied, decoupled
        weights = [torch.randn(size, device=device) for size in SIZES]
        moments = [torch.zeros(2, size, device=device) for size in SIZES]
        copies = [weight.bfloat16() if copied else None for weight in weights]
        twins = [nn.Parameter(weight.double()) for weight in weights]
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        optimizer, one_pass = kind(twins, lr=0.02, betas=BETAS, eps=TINY, weight_decay=0.1), OnePass()
        for step in range(1, 4):
            flat = torch.randn(sum(SIZES) + 1, device=device).mul_(50).to(dtype)[step % 2 :]
            gradients = flat[: sum(SIZES)].split(SIZES)
            for twin, gradient in zip(twins, gradients, strict=True):
                twin.grad = gradient.double() * FACTOR
            optimizer.step()
            numbers = Hyperparameters(step, 0.02, BETAS, TINY, 0.1, decoupled)
            lots = zip(weights, gradients, moments, copies, strict=True)
            one_pass.prepared([Updated(w, g, m[0], m[1], c) for w, g, m, c in lots])(numbers, FACTOR)
        for weight, twin, moment, copy in zip(weights, twins, moments, copies, strict=True):
            assert torch.allclose(weight.double(), twin, rtol=1e-4, atol=1e-6), told
            kept = optimizer.state[twin]
            assert torch.allclose(moment[0].double(), kept["exp_avg"], rtol=1e-4, atol=1e-4), told
            assert torch.allclose(moment[1].double(), kept["exp_avg_sq"], rtol=1e-4, atol=1e-4), told
            rounding = 2**-7 if choice.interpreted else 2**-8  # which interpreted is down
            assert copy is None or torch.allclose(copy.float(), weight, rtol=rounding, atol=0), told


def test_the_kernel_is_its_twin() -> None:
    runs("import tests.kernels.test_adamw as test; test.compare('cpu')", TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_the_kernel_is_its_twin_on_a_gpu() -> None:
    compare("cuda")
