"""Attention by FlashAttention 4 where torch would take cuDNN's kernel or its own: for whoever has the package.

It stands in the dispatcher, below ``scaled_dot_product_attention``: models, compiled or not, recomputation and counts
of FLOPs see the operations they know. What it is not made for, or does no faster, goes to the kernel that torch has.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from phalanx.kernels.choice import Kernel
from phalanx.kernels.packed_attention import BELOW, CASES, agrees

PACKAGE = "flash_attn.cute.interface"
SHORTEST = {64: 1024, 128: 4096}
"""By width of a head, the shortest sequences that it attends to faster (benchmarks/RESULTS.md)."""
HOPPER = 9
"""The first number of its compute capability. On other devices it was not measured, and is left alone."""
DEFAULTS: tuple[Any, ...] = (0.0, False, False)
"""No dropout, no causal mask, no mask of what was dropped: what the dispatcher leaves out."""
FORWARD = ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention")
VARLEN = "_flash_attention_forward", "_flash_attention_backward"
"""What ``varlen_attn`` of torch's becomes."""


def suits(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, bias: Tensor | None) -> bool:
    """Whether it computes this, and faster. Asked forward and backward, of the same tensors."""
    length, width = query.shape[2:]
    return (
        bias is None
        and not dropout_p
        and query.dtype in (torch.bfloat16, torch.float16)
        and width in SHORTEST
        and value.shape[3] == width
        and min(length, key.shape[2]) >= SHORTEST[width]
        and (key.shape[2] == length or not is_causal)  # torch counts a causal mask from the first key, it from the last
        and not torch.are_deterministic_algorithms_enabled()  # its sums of queries' gradients come in any order
        and flash_attention.works(query.device)
    )


def attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """Values of ``[batch, heads, time, width]``, laid out as queries are, and the logarithms of the softmax's sums."""
    out = torch.empty_like(query)
    sums = _package()._flash_attn_fwd(
        *(x.transpose(1, 2) for x in (query, key, value)), causal=is_causal, softmax_scale=scale, return_lse=True,
        out=out.transpose(1, 2),
    )[1]  # fmt: skip
    return out, sums


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values, laid out as these are."""
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    _package()._flash_attn_bwd(
        *(x.transpose(1, 2) for x in (query, key, value, out, grad)), sums, softmax_scale=scale, causal=is_causal,
        dq=dq, dk=dk, dv=dv,
    )  # fmt: skip
    return grads


def suits_packed(query: Tensor, value: Tensor, ends: Tensor | None, window: tuple[int | None, ...]) -> bool:
    """Whether it computes attention of sequences laid end to end, ``[tokens, heads, width]``: none that slides."""
    return (
        ends is not None
        and window in ((None, None), (-1, -1), (-1, 0))
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[2] in SHORTEST
        and value.shape[2] == query.shape[2]
        and not torch.are_deterministic_algorithms_enabled()
        and packed_flash_attention.found_to_work(query.device)
    )


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, sequences: Mapping[str, Any], is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Values of ``[tokens, heads, width]``, and the logarithms of the softmax's sums, ``[heads, tokens]``.

    ``sequences``: where they begin and how long they may be, as the package names it.
    """
    out = torch.empty_like(query)
    sums = _package()._flash_attn_fwd(
        query, key, value, **sequences, causal=is_causal, softmax_scale=scale, return_lse=True, out=out
    )[1]
    return out, sums


def attend_packed_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, sequences: Mapping[str, Any],
    is_causal: bool, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    found = _package()._flash_attn_bwd(
        query, key, value, out, grad.contiguous(), sums, softmax_scale=scale, causal=is_causal, **sequences
    )
    return found[0], found[1], found[2]


@cache
def _package() -> Any:
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # compiled kernels are kept between runs
    return importlib.import_module(PACKAGE)


@cache
def _installed() -> torch.library.Library:
    """Put before torch's kernels, for as long as the process lives."""
    library = torch.library.Library("aten", "IMPL", "CUDA")
    for name in FORWARD:
        for of, made in ((name, _forward), (f"{name}_backward", _backward)):
            before = torch.library.get_kernel(f"aten::{of}", "CUDA")
            library.impl(of, made(name, before.call_boxed), "CUDA", with_keyset=True)
    for of, made_packed in zip(VARLEN, (_packed_forward, _packed_backward), strict=True):
        before = torch.library.get_kernel(f"aten::{of}", "CUDA")
        library.impl(of, made_packed(before.call_boxed), "CUDA", with_keyset=True)
    return library


def _forward(name: str, before: Callable[..., Any]) -> Callable[..., Any]:
    with_bias = "cudnn" in name

    def forward(keys: Any, query: Tensor, key: Tensor, value: Tensor, *more: Any, scale: float | None = None) -> Any:
        bias = more[0] if with_bias else None
        given = more[2:] if with_bias else more  # what follows the bias: whether the sums are wanted
        dropout_p, is_causal, debug = given + DEFAULTS[len(given) :]
        if debug or not suits(query, key, value, dropout_p, is_causal, bias):
            return before(keys, query, key, value, *more, scale=scale)
        out, sums = attend(query, key, value, is_causal, scale)
        drawn = torch.empty((), dtype=torch.long, device=query.device)  # nothing is: the draws of a dropout
        lengths = None, None, query.shape[2], key.shape[2]
        return out, sums.unsqueeze(-1) if with_bias else sums, *lengths, drawn, drawn, out.new_empty(0)

    return forward


def _backward(name: str, before: Callable[..., Any]) -> Callable[..., Any]:
    with_bias = "cudnn" in name

    def backward(
        keys: Any, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, *more: Any,
        scale: float | None = None,
    ) -> Any:  # fmt: skip
        bias = more[2] if with_bias else None
        dropout_p, is_causal = more[7:9] if with_bias else more[4:6]
        if not suits(query, key, value, dropout_p, is_causal, bias):
            return before(keys, grad, query, key, value, out, sums, *more, scale=scale)
        return attend_backward(grad, query, key, value, out, sums.flatten(2), is_causal, scale)

    return backward


def _packed_forward(before: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        keys: Any, query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor | None, ends_k: Tensor | None, *more: Any,
        scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
        **others: Any,
    ) -> Any:  # fmt: skip
        window = window_size_left, window_size_right
        given = {"scale": scale, "window_size_left": window[0], "window_size_right": window[1], **others}
        dropout_p, is_causal, debug = more[2:5]
        unknown = debug or dropout_p or any(other is not None for other in others.values())
        if unknown or not suits_packed(query, value, ends_q, window):
            return before(keys, query, key, value, ends_q, ends_k, *more, **given)
        assert ends_q is not None
        assert ends_k is not None
        out, sums = attend_packed(query, key, value, _named(ends_q, ends_k, *more[:2]), is_causal, scale)
        drawn = torch.empty(2, dtype=torch.uint64, device=query.device)  # nothing is: the draws of a dropout
        return out, sums, drawn, drawn.new_empty(()), out.new_empty(0)

    return forward


def _packed_backward(before: Callable[..., Any]) -> Callable[..., Any]:
    def backward(
        keys: Any, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor,
        ends_q: Tensor | None, ends_k: Tensor | None, *more: Any, scale: float | None = None,
        window_size_left: int | None = None, window_size_right: int | None = None,
    ) -> Any:  # fmt: skip
        window = window_size_left, window_size_right
        dropout_p, is_causal = more[2:4]
        if dropout_p or not suits_packed(query, value, ends_q, window):
            given = {"scale": scale, "window_size_left": window[0], "window_size_right": window[1]}
            return before(keys, grad, query, key, value, out, sums, ends_q, ends_k, *more, **given)
        assert ends_q is not None
        assert ends_k is not None
        sequences = _named(ends_q, ends_k, *more[:2])
        return attend_packed_backward(grad, query, key, value, out, sums, sequences, is_causal, scale)

    return backward


def _named(ends_q: Tensor, ends_k: Tensor, longest_q: int, longest_k: int) -> dict[str, Any]:
    return {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k, "max_seqlen_q": longest_q, "max_seqlen_k": longest_k}


def _tried(device: torch.device) -> bool:
    """Held against torch's plain attention in float32, as close as torch's own kernel is held."""
    if torch.cuda.get_device_capability(device)[0] != HOPPER:
        raise RuntimeError("it is for Hopper GPUs alone")
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, grad = (
        torch.randn(1, heads, SHORTEST[64], 64, generator=generator, device=device, dtype=torch.bfloat16)
        for heads in (4, 2, 2, 4)
    )
    out, sums = attend(q, k, v, True, None)
    found = out, *attend_backward(grad, q, k, v, out, sums, True, None)
    with sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        wide_q, wide_k, wide_v = wide = [x.float().requires_grad_() for x in (q, k, v)]
        right = F.scaled_dot_product_attention(wide_q, wide_k, wide_v, is_causal=True, enable_gqa=True)
        expected = right, *torch.autograd.grad(right, wide, grad.float())
    return all((a.float() - b).norm() < 1e-2 * b.norm() for a, b in zip(found, expected, strict=True))


def _tried_packed(device: torch.device) -> bool:
    if torch.cuda.get_device_capability(device)[0] != HOPPER:
        raise RuntimeError("it is for Hopper GPUs alone")
    return agrees(varlen, device, CASES[:2])  # each is compiled, for seconds


def varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, longest_q: int, longest_k: int,
    causal: bool, scale: float | None,
) -> Tensor:  # fmt: skip
    """What `kernels.varlen` is, by the package's own function."""
    return _package().flash_attn_varlen_func(
        query, key, value, **_named(cu_q, cu_k, longest_q, longest_k), causal=causal, softmax_scale=scale,
        return_lse=True,
    )[0]  # fmt: skip


flash_attention = Kernel.declared("FlashAttention 4", _tried, PACKAGE)
packed_flash_attention = Kernel.declared("FlashAttention 4 of packed documents", _tried_packed, PACKAGE)
BELOW.append(packed_flash_attention)


def stand_in(device: torch.device) -> None:
    """Have it used from here on, where it works and runs need not repeat their bits."""
    if device.type == "cuda" and not torch.are_deterministic_algorithms_enabled() and flash_attention.works(device):
        _installed()
