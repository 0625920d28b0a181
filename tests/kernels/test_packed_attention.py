"""Attention inside packed documents: the twin, how documents are laid end to end for a kernel, and the kernel."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels import packed_attention as packed
from phalanx.kernels.documents import starts_of
from tests.kernels.sequences import one_by_one

CPU = torch.device("cpu")


def documents(rows: int, length: int, seed: int) -> Tensor:
    """Ids of documents of random lengths, some of one token, the last of padding."""
    draw = torch.Generator().manual_seed(seed)
    new = torch.rand(rows, length, generator=draw) < torch.rand(rows, 1, generator=draw) * 0.2
    return new.long().cumsum(1)


def some(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "first", "queries"), [(4, 0, 61), (2, 20, 30), (1, 31, 30)])
@pytest.mark.parametrize("seed", [0, 1])
def test_documents_laid_end_to_end_are_rows_under_a_mask(
    causal: bool, heads: int, first: int, queries: int, seed: int
) -> None:
    """Values and gradients, of shared heads and of chunks, in float64: what a kernel is given, without one."""
    torch.manual_seed(seed)
    ids = documents(3, 61, seed)
    starts = starts_of(ids)
    assert starts is not None
    q, k, v, grad = some(3, 4, queries, 6), some(3, heads, 61, 6), some(3, heads, 61, 6), torch.randn(3, 4, queries, 6)
    last = first + queries if causal else 61
    same = ids.unsqueeze(2) == ids.unsqueeze(1)
    mask = (same.tril() if causal else same)[:, first : first + queries].unsqueeze(1)
    right = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True, scale=0.3)
    expected = right, *torch.autograd.grad(right, (q, k, v), grad.double())
    laid = partial(packed.laid_end_to_end, one_by_one)
    for attend in (packed.packed_attention, lambda q, k, v, *rest: laid(q, k[:, :, :last], v[:, :, :last], *rest)):
        out = attend(q, k, v, starts, causal, 0.3, first)
        found = out, *torch.autograd.grad(out, (q, k, v), grad.double())
        for one, other in zip(found, expected, strict=True):
            assert (one - other).abs().max() < 1e-12


def test_a_kernel_that_mixes_documents_is_not_used() -> None:
    def mixed(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, _: int, __: int, *how: Any) -> Tensor:
        return one_by_one(q, k, v, cu_q[[0, -1]], cu_k[[0, -1]], len(q), len(k), *how)

    assert packed.agrees(one_by_one, CPU)
    assert not packed.agrees(mixed, CPU)


@pytest.mark.parametrize(("dtype", "width", "words"), [
    (torch.float32, 64, "no kernel computes it in float32"),
    (torch.bfloat16, 72 + 1, "heads are 73 wide"),
    (torch.float16, 512, "heads are 512 wide"),
])  # fmt: skip
def test_what_no_kernel_takes(dtype: torch.dtype, width: int, words: str) -> None:
    assert words in packed.refusal(torch.device("cuda"), dtype, width)
    assert not packed.takes(torch.zeros(1, 1, 1, width, dtype=dtype), torch.zeros(1, 1, 1, width, dtype=dtype))
    assert not packed.refusal(CPU, dtype, width), "processors have a mask, and say nothing"


def test_runs_that_repeat_their_bits_do_without_it() -> None:
    narrow = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16)
    assert packed.takes(narrow, narrow)
    torch.use_deterministic_algorithms(True)
    try:
        assert not packed.takes(narrow, narrow)
        assert "exact" in packed.refusal(torch.device("cuda"), torch.bfloat16, 64)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_dense_mask_is_said_once() -> None:
    packed._say_once.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        packed._say_once("of this test")
        packed._say_once("of this test")
        packed.say_dense("of a processor, which needs no kernel", torch.zeros(1))
    assert [str(one.message) for one in said] == [
        "packed documents are kept apart by a dense mask, which is slow: of this test."
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("heads", "width", "causal"), [(8, 64, True), (2, 128, True), (2, 64, False), (4, 40, True)])
def test_the_kernel_computes_what_the_twin_does(compiled: bool, heads: int, width: int, causal: bool) -> None:
    """With FlashAttention 4 below it where that is installed; and another number of documents is no other program."""
    from phalanx.kernels import flash_attention

    device = torch.device("cuda", torch.cuda.current_device())
    flash_attention.stand_in(device)
    assert not packed.refusal(device, torch.bfloat16, width)
    attend = torch.compile(packed.packed_attention) if compiled else packed.packed_attention
    for seed in range(3):
        torch.manual_seed(seed)
        ids = documents(2, 777 // 4, seed).repeat_interleave(4, 1)  # too short ones are not for it
        ids = torch.cat([ids, ids[:, -1:]], 1).to(device)
        starts = starts_of(ids)
        assert starts is not None
        for first, queries in ((0, 777), (300, 200)):
            q, k, v, grad = (
                torch.randn(2, h, t, width, device=device)
                for h, t in ((8, queries), (heads, 777), (heads, 777), (8, queries))
            )
            given = [x.bfloat16().requires_grad_() for x in (q, k, v)]
            out = attend(*given, starts, causal, None, first)
            found = out, *torch.autograd.grad(out, given, grad.bfloat16())
            wide = [x.detach().double().requires_grad_() for x in given]
            right = packed.packed_attention(*wide, starts, causal, None, first)
            expected = right, *torch.autograd.grad(right, wide, grad.bfloat16().double())
            for a, b in zip(found, expected, strict=True):
                assert (a.double() - b).norm() < 1e-2 * b.norm()
