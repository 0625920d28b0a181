"""Attention by FlashAttention 4: what goes to it, and that it computes what torch does."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from phalanx.kernels import flash_attention as flash
from phalanx.kernels.packed_attention import BELOW

CPU = torch.device("cpu")


@pytest.fixture
def works_here() -> Iterator[None]:
    flash.flash_attention.settle(CPU, True)
    yield
    del flash.flash_attention._works[CPU]


def some(heads: int = 2, length: int = 1024, width: int = 64, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(1, heads, length, width, dtype=dtype)


@pytest.mark.usefixtures("works_here")
def test_what_it_is_made_for() -> None:
    assert flash.suits(some(4), some(), some(), 0.0, True, None)
    assert flash.suits(some(), some(length=2048), some(length=2048), 0.0, False, None)
    assert flash.suits(
        some(length=4096, width=128), some(length=4096, width=128), some(length=4096, width=128), 0.0, True, None
    )


@pytest.mark.usefixtures("works_here")
@pytest.mark.parametrize(
    ("query", "key", "dropout", "causal", "bias"),
    [
        (some(), some(), 0.1, True, None),
        (some(), some(), 0.0, False, torch.zeros(1024, 1024)),
        (some(length=1000), some(length=1000), 0.0, True, None),
        (some(length=2048, width=128), some(length=2048, width=128), 0.0, True, None),
        (some(width=96), some(width=96), 0.0, True, None),
        (some(), some(length=2048), 0.0, True, None),
        (some(dtype=torch.float32), some(dtype=torch.float32), 0.0, True, None),
        (some(dtype=torch.float64), some(dtype=torch.float64), 0.0, True, None),
    ],
)
def test_what_stays_with_torch(query: Tensor, key: Tensor, dropout: float, causal: bool, bias: Tensor | None) -> None:
    """Dropout, masks, short or wide heads, causal masks of unequal lengths, and numbers of proofs."""
    assert not flash.suits(query, key, key, dropout, causal, bias)


@pytest.mark.usefixtures("works_here")
def test_runs_that_repeat_their_bits_do_without_it() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert not flash.suits(some(), some(), some(), 0.0, True, None)
    finally:
        torch.use_deterministic_algorithms(False)


def laid(dtype: torch.dtype = torch.bfloat16, width: int = 64) -> Tensor:
    return torch.zeros(10, 2, width, dtype=dtype)


def test_packed_documents_it_is_made_for() -> None:
    """Those that do not slide, once it has been tried: in the dispatcher it cannot be."""
    ends = torch.zeros(3, dtype=torch.int32)
    assert flash.packed_flash_attention in BELOW
    assert not flash.suits_packed(laid(), laid(), ends, (-1, 0))
    flash.packed_flash_attention.settle(CPU, True)
    try:
        assert flash.suits_packed(laid(), laid(), ends, (-1, 0))
        assert flash.suits_packed(laid(), laid(), ends, (-1, -1))
        assert not flash.suits_packed(laid(), laid(), ends, (128, 0))
        assert not flash.suits_packed(laid(), laid(), None, (-1, 0)), "a dense one, which comes here too"
        assert not flash.suits_packed(laid(width=40), laid(width=40), ends, (-1, 0))
        assert not flash.suits_packed(laid(), laid(width=128), ends, (-1, 0))
        assert not flash.suits_packed(laid(torch.float32), laid(torch.float32), ends, (-1, 0))
    finally:
        del flash.packed_flash_attention._works[CPU]


def test_processors_are_not_asked() -> None:
    flash.stand_in(CPU)
    assert CPU not in flash.flash_attention._works


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("heads", "length", "width", "causal"), [(2, 1333, 64, True), (4, 1024, 64, False), (4, 4500, 128, True)]
)
def test_it_computes_what_torch_does(compiled: bool, heads: int, length: int, width: int, causal: bool) -> None:
    """On odd lengths, shared keys and hostile numbers, below torch's own function, and no other way round it."""
    pytest.importorskip("flash_attn.cute", reason="flash-attn-4 is not installed (the flash extra has it)")
    device = torch.device("cuda", torch.cuda.current_device())
    flash.stand_in(device)
    q, k, v, grad = (torch.randn(2, h, length, width, device=device) for h in (4, heads, heads, 4))
    k[..., 7, :] *= 30
    given = [x.bfloat16().requires_grad_() for x in (q, k, v)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        out = (torch.compile(attend) if compiled else attend)(*given)
        found = out, *torch.autograd.grad(out, given, grad.bfloat16())
    assert any("flash_attncuteflash_bwd" in event.key for event in seen.key_averages())
    with mock.patch.object(flash, "suits", return_value=False):
        out = attend(*given)
        theirs = out, *torch.autograd.grad(out, given, grad.bfloat16())
    with sdpa_kernel(SDPBackend.MATH):
        wide = [x.detach().double().requires_grad_() for x in given]
        right = attend(*wide)
        expected = right, *torch.autograd.grad(right, wide, grad.bfloat16().double())
    for a, b, c in zip(found, theirs, expected, strict=True):
        assert not torch.equal(a, b), "torch's own kernel was held against itself"
        assert (a.double() - c).norm() < 1.25 * (b.double() - c).norm(), "further off than torch's own in bf16"
