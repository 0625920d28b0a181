"""Attention of sequences of any length: torch's own is called as its version wants it."""

from __future__ import annotations

import inspect

import pytest
import torch

from phalanx.kernels.varlen import varlen, varlen_attn
from phalanx.parallel.torch_private import FakeTensorMode
from tests.kernels.sequences import one_by_one


@pytest.mark.parametrize("heads", [4, 2])
def test_it_is_called_with_what_torch_knows(heads: int) -> None:
    """On tensors without memory, which go as far as to the kernel."""
    known = inspect.signature(varlen_attn).parameters
    assert {"cu_seq_q", "cu_seq_k", "max_q", "max_k", "scale", "window_size"} <= known.keys()
    with FakeTensorMode():
        q, k = torch.empty(10, 4, 64, dtype=torch.bfloat16), torch.empty(12, heads, 64, dtype=torch.bfloat16)
        ends = torch.empty(3, dtype=torch.int32)
        assert varlen(q, k, k, ends, ends, 8, 8, True, 0.5).shape == q.shape


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
def test_it_computes_each_sequence(causal: bool) -> None:
    """Sequences without queries, and without anything, among them."""
    device = torch.device("cuda", torch.cuda.current_device())
    cu_q, cu_k = (
        torch.tensor(ends, dtype=torch.int32, device=device)
        for ends in ([0, 0, 1, 130, 300, 300, 300], [0, 64, 65, 400, 570, 600, 600])
    )
    q, k, v, grad = (torch.randn(t, h, 64, device=device) for t, h in ((300, 4), (600, 2), (600, 2), (300, 4)))
    given = [x.bfloat16().requires_grad_() for x in (q, k, v)]
    out = varlen(*given, cu_q, cu_k, 170, 335, causal, None)
    found = out, *torch.autograd.grad(out, given, grad.bfloat16())
    wide = [x.detach().double().requires_grad_() for x in given]
    right = one_by_one(*wide, cu_q, cu_k, 170, 335, causal, None)
    expected = right, *torch.autograd.grad(right, wide, grad.bfloat16().double())
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).norm() < 1e-2 * b.norm()
