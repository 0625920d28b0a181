"""Kernels against their plain twins, interpreted: odd sizes, hostile numbers, every bending, every dtype."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from phalanx.kernels import choice
from phalanx.kernels.cross_entropy import AS_THEY_ARE, KERNEL, Bending, gradient_, scaled, statistics
from tests.kernels.apart import runs

BENDINGS = {"none": AS_THEY_ARE, "scaled": Bending(0.25), "capped": Bending(1 / 30, 30.0)}


def rows(classes: int = 37) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(classes)
    logits = torch.randn(9, classes, dtype=torch.float64, generator=generator) * 20
    index = torch.randint(0, classes, (9,), generator=generator)
    return logits, index, torch.arange(9) % 4 != 1


@pytest.mark.parametrize("bending", BENDINGS.values(), ids=BENDINGS)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_twin_is_torchs(bending: Bending, smoothing: float) -> None:
    logits, index, valid = rows()
    leaf = logits.clone().requires_grad_()
    bent = bending(leaf)
    expected = F.cross_entropy(bent[valid], index[valid], reduction="sum", label_smoothing=smoothing)
    expected.backward()
    index = index.where(valid, -1)
    found = statistics(logits, index, bending)
    normaliser = found.top + found.spread.log()
    loss = normaliser - (1 - smoothing) * found.chosen - smoothing * found.total / logits.shape[1]
    assert torch.allclose(loss[valid].sum(), expected, rtol=1e-12)
    gradient = gradient_(logits, index, normaliser, valid, smoothing / logits.shape[1], smoothing, bending)
    assert torch.allclose(gradient, leaf.grad, rtol=1e-10, atol=1e-13)


TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def compare(device: str) -> None:
    """Kernels on a device and their twin in float64, on fresh random numbers."""
    seed = torch.seed()
    choice.interpreted = device == "cpu"
    for dtype, classes, bending, smoothing in product(TOLERANCES, (1, 33, 1000, 9001), BENDINGS.values(), (0.0, 0.1)):
        told = seed, dtype, classes, bending, smoothing
        logits = torch.empty(11, classes + 5, dtype=dtype, device=device)[:, :classes]
        logits.copy_(torch.randn(11, classes) * 30)
        if classes > 1:
            logits[2, classes // 2] = -math.inf if bending is AS_THEY_ARE else -3e4
        index = torch.randint(0, classes, (11,)).where(torch.arange(11) % 3 > 0, -1).to(device)
        valid = (torch.arange(11) % 5 != 2).to(device)
        plain = logits.double()
        assert KERNEL.used(logits)
        assert not KERNEL.used(plain)
        found, want = statistics(logits, index, bending), statistics(plain, index, bending)
        assert torch.allclose(found.top.double(), want.top, rtol=1e-5, atol=1e-5), told
        assert torch.allclose(found.chosen.double(), want.chosen, rtol=1e-5, atol=1e-5), told
        assert torch.allclose(found.spread.double(), want.spread, rtol=1e-5), told
        assert torch.allclose(found.total.double(), want.total, rtol=1e-4, atol=1e-3), told
        normaliser, share = want.top + want.spread.log(), smoothing / classes
        got = gradient_(logits, index, normaliser.float(), valid, share, smoothing, bending)
        assert got is logits
        expected = gradient_(plain, index, normaliser, valid, share, smoothing, bending)
        tolerance = TOLERANCES[dtype]
        # a logit of 100 has its last bit at 8e-6
        assert torch.allclose(got.double(), expected, rtol=tolerance, atol=max(tolerance / 10, 2e-5)), told
    for bending in BENDINGS.values() if device == "cuda" else ():  # the interpreter has no 8 bits
        logits, index = torch.randn(7, 131, device=device), torch.arange(7, device=device)
        known = statistics(logits, index, bending)
        given = index, known.top + known.spread.log(), index < 6, 0.0, 0.0, bending
        narrow = gradient_(logits.clone(), *given, torch.empty(7, 131, device=device).to(torch.float8_e5m2), 64.0)
        expected = gradient_(logits, *given) * 64
        assert torch.allclose(narrow.float(), expected, rtol=0.13, atol=2e-5), (seed, bending)
    for dtype, size in product((torch.bfloat16, torch.float16), ((0, 3), (1,), (77, 131), (3, 4096))):
        given, factor = torch.randn(size, device=device), torch.randn((), device=device)
        found = scaled(given, factor, dtype)
        assert found.dtype == dtype
        # interpreted, it is cut off, not rounded
        assert torch.allclose(found.float(), given * factor, rtol=torch.finfo(dtype).eps, atol=1e-7), (
            seed,
            dtype,
            size,
        )
    assert KERNEL.works(torch.device(device))
    bad = torch.zeros(2, 300, device=device)
    bad[1, 299] = math.nan
    assert statistics(bad, torch.tensor([0, 1], device=device), AS_THEY_ARE).spread.isnan().tolist() == [False, True]
    nothing = torch.zeros(3, 0, dtype=torch.bfloat16, device=device)
    assert statistics(nothing, torch.full((3,), -1, device=device), AS_THEY_ARE).top.dtype == torch.float32


def test_kernels_are_their_twins() -> None:
    runs("import tests.kernels.test_cross_entropy as test; test.compare('cpu')", TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_kernels_are_their_twins_on_a_gpu() -> None:
    compare("cuda")
