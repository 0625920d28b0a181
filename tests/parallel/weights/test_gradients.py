"""A step's summed gradients: their norm is that of all of them once, and narrow ones are scaled wide."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import phalanx
from phalanx.parallel.weights.gradients import sum_of_squares
from tests.parity import HostileLanguage
from tests.ranks import Ranks


class Measured(phalanx.Callback):
    """Notes the norm of all ranks' gradients, and what it should be."""

    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []

    def on_gradients(self, engine: Any, divisor: float, without: set[str]) -> None:
        squared = engine.spread.gradients.norm_squared()
        engine.mesh.world.all_reduce(squared).wait()
        whole = [g.double().flatten() for g in engine.whole_gradients(1.0, without).values() if g is not None]
        self.found.append((float(squared) ** 0.5, float(torch.cat(whole).norm())))


def norms(layout: str) -> list[tuple[float, float]]:
    measured = Measured()
    with phalanx.Engine(HostileLanguage(), layout, device="cpu") as engine:
        engine.callbacks.add(measured)
        for _, batch in zip(range(2), engine.batches(), strict=False):
            engine.step(batch)
    return measured.found


@pytest.mark.parametrize("layout", ["dp=2", "fsdp=2", "tp=2", "pp=2,micro_batch=2", "cp=2"])
def test_the_norm_is_of_all_gradients_once(ranks: Ranks, layout: str) -> None:
    for found, want in ranks(2, norms, layout)[0]:
        assert found == pytest.approx(want, rel=1e-9)


def test_narrow_gradients_are_measured_and_scaled_wide() -> None:
    with phalanx.Engine(HostileLanguage(precision="bf16"), "dp=1", device="cpu") as engine:
        spread = engine.spread
        spread.reduction.start_step(as_made=True)
        bucket = spread.gradients.buckets[0]
        for weight in bucket.trainable:
            bucket.collect(weight, torch.full_like(weight.full, 1.0))
        bucket.complete()
        assert bucket.owned is None
        assert all(bucket.gradient_own(weight).dtype == torch.bfloat16 for weight in bucket.trainable)
        spread.gradients.buckets = [bucket]
        elements = sum(weight.shape.numel() for weight in bucket.trainable)
        assert float(spread.gradients.norm_squared()) == pytest.approx(elements, rel=1e-6)
        spread.gradients.give(1 / 3, set(), {})
        for weight in bucket.trainable:
            assert weight.shard.grad is not None
            assert float(weight.shard.grad.flatten()[0]) == pytest.approx(1 / 3, rel=1e-7)
        spread.reduction.start_step(as_made=False)
        assert bucket.owned_pieces() == []


@pytest.mark.parametrize("sizes", [(3_000_000,), (1, 4095, 4096, 0, 4097, 2_000_000), (5,), (0,)])
def test_the_norm_of_many_numbers_is_not_rounded_away(sizes: tuple[int, ...]) -> None:
    """Beside a number that is larger than all others by far, which a sum in one row would lose."""
    torch.manual_seed(0)
    tensors = [torch.rand(size) * 1e-3 for size in sizes]
    tensors.append(torch.rand(300, 200).t())
    if sizes[0]:
        tensors[0][0] = 30.0
    want = sum(float(tensor.double().square().sum()) for tensor in tensors)
    assert float(sum_of_squares(tensors, torch.float32)) == pytest.approx(want, rel=1e-6)
    tensors[-1][3, 5] = float("nan")
    assert not sum_of_squares(tensors, torch.float32).isfinite()
