"""Products in 8 bits: near the wide ones, differentiable, and the same with the kernel and with its twin."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from phalanx.kernels import choice, fp8
from tests.kernels.apart import runs


def numbers(rows: int = 48, wide: int = 80, out: int = 32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """An input, a weight and a gradient, of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((rows, wide), 3.0), ((out, wide), 0.02), ((rows, out), 1e-6)
    x, weight, gradient = (torch.randn(size, generator=generator).bfloat16() * by for size, by in sizes)
    return x.requires_grad_(), weight.requires_grad_(), gradient


def off(found: Tensor | None, expected: Tensor) -> float:
    assert found is not None
    return float((found.detach().float() - expected).norm() / expected.norm())


def maxima(*tensors: Tensor) -> Tensor:
    return torch.stack([tensor.detach().float().abs().max() for tensor in tensors]).requires_grad_()


@pytest.mark.parametrize("rows", [48, 47, 1])
@pytest.mark.parametrize("kind", ["measured", "known", "rows"])
def test_outputs_and_gradients_are_near_wide_ones(kind: str, rows: int) -> None:
    x, weight, gradient = numbers(rows)
    largest = maxima(x, weight, gradient)
    if kind == "rows":
        out = fp8.rowwise(x, weight)
    else:
        out = fp8.tensorwise(x, weight, largest, largest.detach()[0], kind == "known")
    out.backward(gradient)
    exact_x, exact_weight, exact = (tensor.detach().float() for tensor in (x, weight, gradient))
    assert out.dtype == torch.bfloat16
    assert 0 < off(out, exact_x @ exact_weight.T) < 0.05
    assert 0 < off(x.grad, exact @ exact_weight) < 0.1
    assert 0 < off(weight.grad, exact.T @ exact_x) < 0.1


def test_the_gradient_of_maxima_is_what_was_largest() -> None:
    x, weight, gradient = numbers()
    largest = maxima(x, weight, gradient)
    used = (largest.detach() * 1.5).requires_grad_()
    fp8.tensorwise(x, weight, used, used.detach()[0], True).backward(gradient)
    assert used.grad is not None
    assert torch.allclose(used.grad, largest.detach(), rtol=0.13)  # in 8 bits, which it is read in


def test_what_has_grown_beyond_its_scale_is_cut_off_and_the_scale_grows() -> None:
    x, weight, gradient = numbers()
    largest = maxima(x, weight, gradient)
    small = (largest.detach() / 10).requires_grad_()
    out = fp8.tensorwise(x, weight, small, small.detach()[0], True)
    out.backward(gradient)
    assert bool(out.isfinite().all())
    assert small.grad is not None
    assert torch.allclose(small.grad, small.detach() * fp8.ROOM, rtol=0.01)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_stays_none(bad: float) -> None:
    x, weight, gradient = numbers()
    largest = maxima(x, weight, gradient)
    with torch.no_grad():
        x[3, 4] = bad
    for out in (fp8.tensorwise(x, weight, largest, largest.detach()[0], True), fp8.rowwise(x, weight)):
        assert bool(out[3].isnan().all())
        assert bool(out[:3].isfinite().all())


def test_zeros_have_a_scale() -> None:
    x, weight, gradient = (torch.zeros_like(tensor) for tensor in numbers())
    zeros = torch.zeros(fp8.MAXIMA, requires_grad=True)
    out = fp8.tensorwise(x.requires_grad_(), weight.requires_grad_(), zeros, zeros.detach()[0], False)
    out.backward(gradient)
    assert not out.any()
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_a_frozen_factor_gets_no_gradient_and_the_other_does(frozen: str) -> None:
    x, weight, gradient = numbers()
    (x if frozen == "x" else weight).requires_grad_(False)
    largest = maxima(x, weight, gradient)
    fp8.tensorwise(x, weight, largest, largest.detach()[0], True).backward(gradient)
    assert (x.grad is None) == (frozen == "x")
    assert (weight.grad is None) == (frozen == "weight")
    assert largest.grad is not None
    assert torch.allclose(largest.grad, largest.detach(), rtol=0.13)


def test_sizes_that_do_not_fit() -> None:
    assert fp8.fits(32, 80)
    assert not fp8.fits(33, 80)
    assert not fp8.fits(32, 81)


def compare(device: str) -> None:
    """The kernel on a device and its twin, over all numbers that 8 bits hold."""
    choice.interpreted = device == "cpu"
    for dtype, (rows, columns) in product((fp8.FINE, fp8.WIDE), [(128, 256), (1, 1), (33, 150), (130, 16), (0, 5)]):
        every = torch.arange(rows * columns).to(torch.uint8).view(rows, columns).to(device)
        narrow = (every & (0xFB if dtype is fp8.WIDE else 0xF7)).view(dtype)  # all but what is no number
        found, top = fp8.transposed(narrow)
        wide = torch.zeros(columns, rows + 16, dtype=torch.uint8, device=device).view(dtype)
        fp8.transpose_into(narrow, wide[:, 8 : 8 + rows])
        expected = narrow.t().contiguous().view(torch.uint8)
        assert torch.equal(found.view(torch.uint8), expected), (dtype, rows, columns)
        assert torch.equal(wide[:, 8 : 8 + rows].contiguous().view(torch.uint8), expected), (dtype, rows, columns)
        assert float(top) == (float(fp8.largest(narrow)) if narrow.numel() else 0), (dtype, rows, columns)
        if narrow.numel():
            narrow[0, 0] = torch.nan
            assert not bool(fp8.transposed(narrow)[1].isfinite()), (dtype, rows, columns)
    assert fp8.KERNEL.works(torch.device(device))


def test_the_kernel_is_its_twin() -> None:
    runs("import tests.kernels.test_fp8 as test; test.compare('cpu')", TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_the_kernel_is_its_twin_on_a_gpu() -> None:
    compare("cuda")


def compare_products(compiled: bool) -> None:
    """Outputs and all gradients of a GPU and of the twin; sums are in another order, and are not as wide."""
    for kind in ("measured", "known", "rows"):
        found = []
        for device in ("cpu", "cuda"):
            x, weight, gradient = (t.detach().to(device) for t in numbers(rows=256, wide=512, out=384))
            largest = maxima(x, weight, gradient)
            own = [tensor.requires_grad_() for tensor in (x, weight)]
            tensorwise, rowwise = fp8.tensorwise, fp8.rowwise
            if compiled and device == "cuda":
                tensorwise, rowwise = torch.compile(tensorwise), torch.compile(rowwise)
            of_x = largest.detach()[0]
            out = rowwise(*own) if kind == "rows" else tensorwise(*own, largest, of_x, kind == "known")
            out.backward(gradient)
            found.append([tensor.detach().float().cpu() for tensor in (out, x.grad, weight.grad)])
        for theirs, ours in zip(*found, strict=True):
            assert off(ours, theirs) < 0.01, kind


@pytest.mark.gpu
def test_products_of_a_gpu_are_those_of_the_twin() -> None:
    compare_products(compiled=False)


@pytest.mark.gpu
def test_compiled_products_of_a_gpu_are_those_of_the_twin() -> None:
    """In a process of its own: the compiler leaves threads behind."""
    runs("import tests.kernels.test_fp8 as test; test.compare_products(compiled=True)")
