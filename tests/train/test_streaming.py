"""Weights on the host, updated piece by piece: as all at once, interpreted and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.kernels import choice
from phalanx.kernels.adamw import Hyperparameters, OnePass, Segment, Updated
from phalanx.train import streaming
from phalanx.train.streaming import Homes, StreamedPass
from tests.kernels.apart import runs
from tests.train.test_update import trained

SIZES = (7, 20, 250, 3)
PARTS = {250: (Segment(0, 50, 9), Segment(50, 200, 200, 31, 77))}
"""Where some of them lie in a whole weight: in one box, and in rows of another."""
CPU = torch.device("cpu")


def compare(dtype: torch.dtype) -> None:
    """Pieces of 64, some of them short; more than there is room for at a time."""
    choice.interpreted, streaming.PIECE = True, 64
    kept: list[list[Updated]] = []
    for one_pass in (OnePass(), StreamedPass(CPU)):
        draw = torch.Generator().manual_seed(0)
        weights = [torch.randn(size, generator=draw) for size in SIZES]
        moments = [torch.zeros(2, size, dtype=dtype) for size in SIZES]
        drawn = [(size, PARTS.get(size, (Segment(0, size),)) if dtype != torch.float32 else ()) for size in SIZES]
        copies = [None if size < 8 else weight.bfloat16() for size, weight in zip(SIZES, weights, strict=True)]
        for step in (1, 2):
            gradients = [torch.randn(size, generator=draw) for size in SIZES]
            lots = zip(weights, gradients, moments, copies, drawn, strict=True)
            updated = [Updated(w, g, m[0], m[1], c, *d) for w, g, m, c, d in lots]
            one_pass.prepared(updated)(Hyperparameters(step, 0.02, (0.9, 0.99), 1e-8, 0.1, decoupled=True), 0.5)
        kept.append(updated)
    for one, other in zip(*kept, strict=True):
        for name in ("weight", "first", "second", "copy"):
            found, want = getattr(other, name), getattr(one, name)
            assert (found is None and want is None) or torch.equal(found, want), (dtype, name, len(one.weight))


def test_pieces_are_updated_as_the_whole() -> None:
    calls = "; ".join(f"test.compare(torch.{name})" for name in ("float32", "uint8"))
    runs(f"import torch; import tests.train.test_streaming as test; {calls}", TRITON_INTERPRET="1")


def test_small_weights_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "PIECE", 64)
    weights = [Updated(*torch.zeros(4, size).unbind(), None) for size in SIZES]
    lots = [[len(piece.weight) for piece in lot] for lot in streaming.together(streaming.pieces(weights))]
    assert lots == [[7, 20], [64], [64], [64], [58], [3]]
    staging = streaming.Staging(64, CPU)
    here = list(staging.like(weights[:2]))
    assert here[1].second.data_ptr() - here[0].second.data_ptr() == 16 * 4
    assert [len(one.first) for one in here] == [7, 20]


def test_state_is_begun_or_brought_home() -> None:
    shard, homes = torch.randn(3, 5), Homes(torch.device("meta"))  # any other than the shard's
    assert not homes.has(shard, None)
    state = homes.bring(shard, None)
    assert homes.has(shard, state)
    assert not homes.has(shard, {**state, "exp_avg": shard})  # somebody has restored it
    assert Homes(CPU).has(shard, state)
    assert float(state["step"]) == 0
    assert not state["exp_avg"].any()
    assert state["exp_avg"].shape == shard.shape
    assert homes.bring(shard, None, torch.uint8)["exp_avg"].dtype == torch.uint8
    again = homes.bring(shard, {**state, "exp_avg": shard * 2})
    assert torch.equal(again["exp_avg"], shard * 2)
    assert again["step"] is state["step"]


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "moments"), [("fp32", "float32"), ("bf16", "float32"), ("fp32", "float8")])
def test_an_offloaded_update_is_that_of_weights_on_the_gpu(precision: str, moments: str) -> None:
    plain: dict[str, Any] = trained(precision, "dp=1", "cuda", kernels=True, moments=moments)
    for how in ("optimizer", "params", "optimizer,offload_percent=40", "params,offload_percent=40"):
        layout = f"dp=1,offload={how}"
        own = trained(precision, layout, "cuda", kernels=True, moments=moments)
        assert own["steps"] == plain["steps"]
        for name, want in plain["weights"].items():
            off = float((own["weights"][name] - want).norm() / want.norm())
            assert off < (1e-5 if precision == "fp32" else 2e-2), (layout, name, off)
