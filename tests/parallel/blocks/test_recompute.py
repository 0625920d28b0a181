"""Recompute: the same numbers from less memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from phalanx.parallel.blocks.recompute import recomputed
from phalanx.parallel.randomness.draws import Moment


def saved_bytes(selective: bool | None) -> int:
    """What autograd keeps for backward: with full recompute the inputs alone, with selective the costly results."""
    moment = Moment()
    weight = torch.randn(64, 64, requires_grad=True)
    kept: dict[int, int] = {}

    def forward(x: torch.Tensor) -> torch.Tensor:
        return F.silu(F.silu(x @ weight).exp().sin() @ weight).exp().sin()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.untyped_storage().size()
        return tensor

    x = torch.randn(32, 64, requires_grad=True)
    run = forward if selective is None else recomputed(forward, moment, selective)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        out = run(x)
    out.sum().backward()
    return sum(kept.values())


def test_less_is_kept() -> None:
    everything, full = saved_bytes(None), saved_bytes(False)
    assert full < everything / 3


@pytest.mark.parametrize("selective", [False, True])
def test_gradients_are_equal_and_recomputing_is_known(selective: bool) -> None:
    moment = Moment()
    passes = []
    weight = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)

    def forward(x: torch.Tensor) -> torch.Tensor:
        passes.append(moment.recomputing)
        return F.silu(x @ weight)

    x = torch.randn(4, 8, dtype=torch.float64)
    expected = torch.autograd.grad(forward(x).sum(), weight)[0]
    passes.clear()
    found = torch.autograd.grad(recomputed(forward, moment, selective)(x).sum(), weight)[0]
    assert torch.equal(found, expected)
    assert passes == [False, True]
    assert not moment.recomputing
