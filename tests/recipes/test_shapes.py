"""The recipe of shapes: drawings that can be told apart."""

from __future__ import annotations

import phalanx
from phalanx.recipes.shapes import KINDS, Drawings, Shapes


def test_drawings_are_the_same_every_time_and_of_every_kind() -> None:
    drawings = Drawings(60, 8)
    assert (drawings[3]["image"] == drawings[3]["image"]).all()
    assert {drawings[i]["label"] for i in range(60)} == set(range(len(KINDS)))


def test_it_learns() -> None:
    with phalanx.Engine(Shapes(width=8, depth=1, size=12, steps=25, samples=300), device="cpu") as engine:
        losses = [engine.step(batch).loss for batch in engine.batches()]
        assert losses[-1] < 0.7 * losses[0]
        assert 0 <= engine.evaluate(batches=2)["accuracy"] <= 1
