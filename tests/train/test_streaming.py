"""Weights on the host, updated piece by piece: as all at once, interpreted and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.kernels import choice
from phalanx.kernels.adamw import Hyperparameters, OnePass, Updated
from phalanx.train import streaming
from phalanx.train.streaming import StreamedPass, brought_home, is_home
from tests.kernels.apart import runs
from tests.train.test_update import trained

SIZES = (1, 40, 7, 129, 256)
CPU = torch.device("cpu")


def compare() -> None:
    """Pieces of 64, some of them short; more than there is room for at a time."""
    choice.interpreted, streaming.PIECE = True, 64
    kept: list[list[Updated]] = []
    for one_pass in (OnePass(), StreamedPass(CPU)):
        draw = torch.Generator().manual_seed(0)
        weights = [torch.randn(size, generator=draw) for size in SIZES]
        moments = [torch.zeros(2, size) for size in SIZES]
        copies = [None if size == 7 else weight.bfloat16() for size, weight in zip(SIZES, weights, strict=True)]
        for step in range(1, 4):
            gradients = [torch.randn(size, generator=draw) for size in SIZES]
            lots = zip(weights, gradients, moments, copies, strict=True)
            updated = [Updated(w, g, m[0], m[1], c) for w, g, m, c in lots]
            one_pass.prepared(updated)(Hyperparameters(step, 0.02, (0.9, 0.99), 1e-8, 0.1, decoupled=True), 0.5)
        kept.append(updated)
    for one, other in zip(*kept, strict=True):
        for name in ("weight", "first", "second", "copy"):
            found, want = getattr(other, name), getattr(one, name)
            assert (found is None and want is None) or torch.equal(found, want), (name, len(one.weight))


def test_pieces_are_updated_as_the_whole() -> None:
    runs("import tests.train.test_streaming as test; test.compare()", TRITON_INTERPRET="1")


def test_state_is_begun_or_brought_home() -> None:
    shard = torch.randn(3, 5)
    state = brought_home(shard, None, CPU)
    assert not is_home(shard, None, CPU)
    assert is_home(shard, state, CPU)
    assert float(state["step"]) == 0
    assert not state["exp_avg"].any()
    assert state["exp_avg"].shape == shard.shape
    again = brought_home(shard, {**state, "exp_avg": shard * 2}, CPU)
    assert torch.equal(again["exp_avg"], shard * 2)
    assert again["step"] is state["step"]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_offloaded_update_is_that_of_weights_on_the_gpu(precision: str) -> None:
    plain: dict[str, Any] = trained(precision, "dp=1", "cuda", kernels=True)
    for how in ("optimizer", "params", "optimizer,offload_percent=40", "params,offload_percent=40"):
        layout = f"dp=1,offload={how}"
        own = trained(precision, layout, "cuda", kernels=True)
        assert own["steps"] == plain["steps"]
        for name, want in plain["weights"].items():
            off = float((own["weights"][name] - want).norm() / want.norm())
            assert off < (1e-5 if precision == "fp32" else 2e-2), (layout, name, off)
