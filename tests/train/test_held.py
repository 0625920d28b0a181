"""Memory by part: what tensors hold is counted, a part is told when it changes, and all parts make up the peak."""

from __future__ import annotations

import phalanx
from phalanx.train.held import EVERY, HeldMemory, counted, held_now
from tests.ranks import Ranks
from tests.tasks import Digits

PARTS = ("weights", "gradients", "optimizer", "activations", "other")


def test_parts_are_those_of_the_engine_and_are_told_once() -> None:
    with phalanx.Engine(Digits(steps=40), device="cpu") as engine:
        memory = HeldMemory(engine)
        batches = engine.batches()
        engine.step(next(batches))
        first = memory.changed()
        weights = sum(4 * weight.numel() for weight in engine.model.parameters())
        assert first["memory_weights"] == weights == first["memory_gradients"]
        assert first["memory_optimizer"] == counted(engine, engine.device)["optimizer"] >= 2 * weights
        assert abs(sum(first[f"memory_{part}"] for part in PARTS) - first["memory_peak"]) < 0.05 * first["memory_peak"]
        assert first["memory_now"] <= first["memory_peak"]
        for _ in range(2 * EVERY):
            engine.step(next(batches))
            later = memory.changed()
            assert "memory_weights" not in later
            assert "memory_optimizer" not in later


def of_sites() -> tuple[int, int]:
    """In memory that is not taken in pages of hundreds of kilobytes."""
    task = Digits(width=1 << 16, steps=8)
    with phalanx.Engine(task, "dp=2,comm=diloco:4:overlap=1", device="cpu") as engine:
        memory = HeldMemory(engine)
        batches = engine.batches()
        for _ in range(3):
            engine.step(next(batches))
        told = memory.changed()
        whole = sum(told[f"memory_{part}"] for part in (*PARTS, "sites"))
        assert abs(whole - told["memory_peak"]) < 0.05 * told["memory_peak"]
        return told["memory_sites"], told["memory_weights"]


def test_what_sites_keep_is_a_part(ranks: Ranks) -> None:
    for sites, weights in ranks(2, of_sites):
        # agreed on, momentum, and a fragment on its way: the message and what left
        assert 4 * weights <= sites <= 4.5 * weights


def test_what_a_process_holds() -> None:
    import torch

    assert held_now(torch.device("cpu")) > 1 << 24
