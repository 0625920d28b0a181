"""Attention inside the documents of packed rows: on GPUs by a kernel of variable lengths, else under a dense mask.

Queries are the last positions of the rows that keys are of, or those from ``first`` on: under ``cp`` a rank has a chunk
of them. The kernel is ``torch.nn.attention.varlen`` (FlashAttention 2, as torch has it), below which FlashAttention 4
stands where it is installed (`kernels.flash_attention`); `benchmarks/packed_attention.py` holds them beside others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from phalanx.kernels.choice import Kernel
from phalanx.kernels.documents import SHORTEST, cumulative, dense_mask, is_recorded

DTYPES = (torch.bfloat16, torch.float16)
WIDEST, MULTIPLE = 256, 8
"""Of a head, what the kernel takes."""
BELOW: list[Kernel] = []
"""Those that torch's kernel may be replaced by in the dispatcher: tried with it, since there they cannot be."""
CASES = ((2, 128, True), (4, 128, True), (2, 512, True), (4, 512, False))
"""By which it is tried: heads of keys, for 4 of queries, queries of 512 positions, and whether it is causal."""
Varlen = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, bool, float | None], Tensor]
"""``(queries, keys, values, cumulative lengths of both, the longest of both, causal, scale)``, of all sequences."""


def refusal(device: torch.device, dtype: torch.dtype, width: int | None) -> str:
    """Why heads of this width and dtype are not attended to by a kernel; processors have none, and need none.

    Heads of a width that is not known are looked at when they are there: `takes`.
    """
    if device.type == "cpu":
        return ""
    if dtype not in DTYPES:
        return f"no kernel computes it in {str(dtype).removeprefix('torch.')}. Train with precision=bf16"
    if width is not None and (width > WIDEST or width % MULTIPLE):
        return f"heads are {width} wide. Choose a multiple of {MULTIPLE} up to {WIDEST}, which a kernel takes"
    if torch.are_deterministic_algorithms_enabled():
        return "an exact run keeps to one order of sums. Without exact= a kernel does it"
    if not packed_kernel.works(device):
        return "its kernel does not work here, as was said. Install a build of torch for this GPU"
    for kernel in BELOW:
        kernel.works(device)
    return ""


def takes(query: Tensor, value: Tensor) -> bool:
    """Whether the kernel can compute with these, where it works."""
    width = query.shape[-1]
    return (
        query.ndim == 4
        and query.dtype in DTYPES
        and width == value.shape[-1] <= WIDEST
        and not width % MULTIPLE
        and not torch.are_deterministic_algorithms_enabled()
    )


def say_dense(why: str, column: Tensor) -> None:
    """Said once of a GPU; ``why`` no kernel does it, if that is not for what is in this ``column`` of a batch."""
    if column.is_cuda:
        recorded = "the step is recorded. Without graphs=step a kernel does it"
        short = f"a row has more than one of them in {SHORTEST} tokens, or one goes on after another. Pack longer ones"
        _say_once(why or (recorded if is_recorded(column) else short))


@cache
def _say_once(why: str) -> None:
    warnings.warn(f"packed documents are kept apart by a dense mask, which is slow: {why}.", stacklevel=4)


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, causal: bool = True, scale: float | None = None,
    first: int | None = None,
) -> Tensor:  # fmt: skip
    """Values of ``[batch, heads, time, width]`` for each query, from its own document alone."""
    first = key.shape[2] - query.shape[2] if first is None else first
    if causal and first + query.shape[2] < key.shape[2]:  # nobody sees the keys behind: the kernel counts from the last
        key, value = (x.narrow(2, 0, first + query.shape[2]) for x in (key, value))
    if not query.is_cuda or not takes(query, value):
        return dense(query, key, value, starts, causal, scale, first)
    from phalanx.kernels.varlen import varlen

    return laid_end_to_end(varlen, query, key, value, starts, causal, scale, first)


def dense(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, causal: bool, scale: float | None, first: int
) -> Tensor:
    """The plain twin."""
    mask = dense_mask(starts, first, query.shape[2], key.shape[2], causal)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )


def laid_end_to_end(
    varlen: Varlen, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, causal: bool, scale: float | None,
    first: int,
) -> Tensor:  # fmt: skip
    """By attention of sequences of any length, laid end to end."""
    batch, _, queries, _ = query.shape
    keys = key.shape[2]
    cu_k = cumulative(starts, 0, keys)
    cu_q = cu_k if queries == keys else cumulative(starts, first, queries)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out = varlen(q, k, v, cu_q, cu_k, queries, keys, causal, scale)
    return out.unflatten(0, (batch, queries)).transpose(1, 2)


def agrees(varlen: Varlen, device: torch.device, cases: Sequence[tuple[int, int, bool]] = CASES) -> bool:
    """Held against the twin in float32: documents of one token and of many, shared heads, and a chunk's queries, of
    which some documents have none."""
    draw = torch.Generator(device).manual_seed(0)
    starts = torch.tensor([[0, 1, 150, 400, 512, 512], [0, 300, 512, 512, 512, 512]], dtype=torch.int32, device=device)
    starts = starts.view(2, 1, 1, 6)
    for heads, queries, causal in cases:
        q, k, v, grad = (
            torch.randn(2, each, time, 64, generator=draw, device=device, dtype=torch.bfloat16)
            for each, time in ((4, queries), (heads, 512), (heads, 512), (4, queries))
        )
        found = _with_gradients(partial(laid_end_to_end, varlen), q, k, v, grad, starts, causal)
        with sdpa_kernel(SDPBackend.MATH):
            expected = _with_gradients(dense, q.float(), k.float(), v.float(), grad.float(), starts, causal)
        if not all((a.float() - b).norm() < 1e-2 * b.norm() for a, b in zip(found, expected, strict=True)):
            return False
    return True


def _with_gradients(
    function: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, grad: Tensor, starts: Tensor,
    causal: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    with torch.enable_grad():
        given = [x.detach().requires_grad_() for x in (query, key, value)]
        out = function(*given, starts, causal, None, key.shape[2] - query.shape[2])
        return out.detach(), *torch.autograd.grad(out, given, grad)


def _tried(device: torch.device) -> bool:
    from phalanx.kernels.varlen import varlen

    return agrees(varlen, device)


packed_kernel = Kernel.declared("packed attention", _tried, "torch.nn.attention.varlen")
