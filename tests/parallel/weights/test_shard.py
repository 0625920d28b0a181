"""ZeRO 3: weights are whole only while they are needed, never stale, and there for whoever asks."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx import Layout
from phalanx.parallel.weights.shard import ReshardedWeight
from phalanx.recipes.sft import SFT
from tests.parallel.test_odd_models import Odd, Stack
from tests.parity import HostileLanguage
from tests.ranks import Ranks


def whole_units(engine: phalanx.Engine) -> list[str]:
    assert engine.spread.gathering is not None
    return [item.unit.name for item in engine.spread.gathering.units if item.bucket.is_whole]


def watch() -> dict[str, object]:
    with phalanx.Engine(Odd(kind=Stack), Layout(fsdp=dist.get_world_size()), device="cpu") as engine:
        seen: dict[str, object] = {"before": whole_units(engine)}
        for index in range(3):
            layer = engine.spread.model.layers[index]
            layer.first.register_forward_hook(lambda m, a, o, i=index: seen.__setitem__(i, whole_units(engine)))
        batch = next(iter(engine.batches()))
        engine.step(batch)
        seen["after"] = whole_units(engine)
        seen["stand-in"] = isinstance(engine.spread.model.stem.weight, ReshardedWeight)
        seen["pending"] = [b.name for b in engine.spread.buckets if b._gathering is not None]
        seen["bytes"] = sum(w.full.untyped_storage().size() for w in engine.spread.weights.values())
        return seen


def test_only_the_block_that_computes_is_whole(ranks: Ranks) -> None:
    seen = ranks(2, watch)[0]
    assert seen["before"] == seen["after"] == seen["pending"] == []
    assert [seen[i] for i in range(3)] == [[f"layers.{i}"] for i in range(3)]
    assert seen["bytes"] == 0
    assert seen["stand-in"]


def peek() -> tuple[torch.Tensor, torch.Tensor]:
    """Read a weight from outside, before and after an update."""
    with phalanx.Engine(Odd(kind=Stack), Layout(fsdp=2), device="cpu") as engine:
        stem = engine.spread.model.stem
        assert stem.weight.shape == (6, 5)
        assert stem.weight.requires_grad
        before = stem.weight.detach().clone()
        engine.spread.rest()
        for batch in engine.batches():
            engine.step(batch)
        return before, stem.weight.detach().clone(), engine.whole_weights()["stem.weight"]


def test_a_resting_weight_wakes_for_whoever_computes_with_it(ranks: Ranks) -> None:
    before, after, saved = ranks(2, peek)[0]
    assert torch.equal(after, saved)
    assert not torch.equal(before, after), "a stale copy was read"


def left_behind(layout: str) -> int:
    with phalanx.Engine(HostileLanguage(), layout, device="cpu") as engine:
        batches = engine.batches()
        for _ in range(2):
            engine.step(next(batches))
        kept = [weakref.ref(bucket) for bucket in engine.spread.buckets]
    del engine, batches
    gc.collect()
    return sum(each() is not None for each in kept)


ZERO_BUBBLE = "pp=2,schedule=zb,micro_batch=2"


@pytest.mark.parametrize("layout", ["fsdp=2", "fsdp=2,recompute=full", "fsdp=2,micro_batch=2", ZERO_BUBBLE])
def test_nothing_is_left_of_an_engine(ranks: Ranks, layout: str) -> None:
    """Hooks on a graph hold its nodes, and those each other: a graph that is let go must have none left."""
    assert ranks(2, left_behind, layout) == [0, 0]


def fetched() -> list[tuple[str, str]]:
    """What of a base in bf16 and LoRA beside it is gathered and let go, in one step."""
    task = SFT(small=True, lora=2, precision="bf16", base_dtype="bf16", length=64, global_batch=2, steps=1)
    found: list[tuple[str, str]] = []
    with phalanx.Engine(task, "fsdp=2", device="cpu") as engine:
        for bucket in engine.spread.buckets:
            for method in ("start_gather", "finish_gather"):
                found_of(bucket, method, found)
        for batch in engine.batches():
            engine.step(batch)
    return found


def found_of(bucket: Any, method: str, found: list[tuple[str, str]]) -> None:
    before = getattr(bucket, method)

    def noted() -> None:
        was = bucket.is_whole, bucket.is_coming
        before()
        if was != (bucket.is_whole, bucket.is_coming):
            found.append((method, bucket.name))

    setattr(bucket, method, noted)


def test_weights_of_a_block_in_two_dtypes_come_together_and_the_next_block_after_them(ranks: Ranks) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (the dev extra has it)")
    for found in ranks(2, fetched):
        coming: set[str] = set()
        for method, name in found:
            if method == "start_gather":
                coming.add(name)
            else:
                coming.discard(name)
            assert len(coming) <= 1, f"{coming} are on their way at once"
        starts = [name for method, name in found if method == "start_gather" and "layers" in name]
        assert all(one == other for one, other in zip(starts[::2], starts[1::2], strict=True))
