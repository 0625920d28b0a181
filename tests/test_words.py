"""Numbers and lists as people read them."""

from __future__ import annotations

import math

import pytest

from phalanx.words import many, sparkline


def test_one_is_not_many() -> None:
    assert [many(n, "step") for n in (0, 1, 2, 1000)] == ["0 steps", "1 step", "2 steps", "1,000 steps"]
    assert many(2, "micro-batch", "micro-batches") == "2 micro-batches"


@pytest.mark.parametrize(
    ("values", "picture"),
    [([], ""), ([1.0], "▁"), ([2.0, 1.0], "█▁"), ([1.0] * 3, "▁▁▁"), ([0.0, math.nan, 7.0], "▁!█"), ([math.nan], "!")],
)
def test_the_shape_of_a_loss(values: list[float], picture: str) -> None:
    assert sparkline(values) == picture


def test_a_long_loss_fits_a_line() -> None:
    assert len(sparkline([math.cos(i / 50) for i in range(1000)])) == 40
