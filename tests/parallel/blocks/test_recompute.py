"""Recompute: the same numbers from less memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from phalanx.parallel.blocks.recompute import Recompute
from phalanx.parallel.forward.activations import ActivationLayout
from phalanx.parallel.randomness.draws import Moment, RandomKeys, Randomness


def randomness() -> Randomness:
    return Randomness(0, Moment(slots=np.arange(2)), torch.device("cpu"))


def kind(selective: bool) -> str:
    return "selective" if selective else "full"


def saved_bytes(selective: bool | None) -> int:
    """What autograd keeps for backward: with full recompute the inputs alone, with selective the costly results."""
    keyed = randomness()
    weight = torch.randn(64, 64, requires_grad=True)
    kept: dict[int, int] = {}

    def forward(x: torch.Tensor) -> torch.Tensor:
        return F.silu(F.silu(x @ weight).exp().sin() @ weight).exp().sin()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.untyped_storage().size()
        return tensor

    x = torch.randn(32, 64, requires_grad=True)
    run = forward if selective is None else Recompute(keyed, kind(selective)).over(forward)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        out = run(x)
    out.sum().backward()
    return sum(kept.values())


def test_less_is_kept() -> None:
    everything, full = saved_bytes(None), saved_bytes(False)
    assert full < everything / 3


@pytest.mark.parametrize("selective", [False, True])
def test_gradients_are_equal_and_recomputing_is_known(selective: bool) -> None:
    keyed = randomness()
    passes = []
    weight = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)

    def forward(x: torch.Tensor) -> torch.Tensor:
        passes.append(keyed.moment.recomputing)
        return F.silu(x @ weight)

    x = torch.randn(4, 8, dtype=torch.float64)
    expected = torch.autograd.grad(forward(x).sum(), weight)[0]
    passes.clear()
    found = torch.autograd.grad(Recompute(keyed, kind(selective)).over(forward)(x).sum(), weight)[0]
    assert torch.equal(found, expected)
    assert passes == [False, True]
    assert not keyed.moment.recomputing


@pytest.mark.parametrize("selective", [False, True])
def test_what_is_recomputed_draws_the_same_and_is_sharded_as_before(selective: bool) -> None:
    keyed = randomness()
    own = ActivationLayout(8, torch.arange(4, 8), torch.arange(6, 8))
    drawn: list[torch.Tensor] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        assert keyed.activations.stream is own
        drawn.append(keyed.uniform(torch.Size([2, 2, 3])))
        return x.sin() * drawn[-1]

    x = torch.randn(2, 2, 3, requires_grad=True)
    with keyed.scope("task"):
        keyed.activations.enter(own)
        RandomKeys("block", keyed)(Recompute(keyed, kind(selective)).over(forward), x).sum().backward()
    assert torch.equal(*drawn)
    assert keyed.activations.stream.time is None
