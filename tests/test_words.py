"""Numbers and lists as people read them."""

from __future__ import annotations

import math

import pytest

from phalanx.words import in_bytes, in_flops, in_time, listed, many, ranks_named, round_number, six_digits, sparkline


def test_one_is_not_many() -> None:
    assert [many(n, "step") for n in (0, 1, 2, 1000)] == ["0 steps", "1 step", "2 steps", "1,000 steps"]
    assert many(2, "micro-batch", "micro-batches") == "2 micro-batches"


def test_ranks_by_their_numbers() -> None:
    found = [ranks_named(ranks, 2) for ranks in ([3], [0, 1], [0, 1, 5])]
    assert found == ["rank 3", "ranks 0, 1", "ranks 0, 1 and 1 more"]


def test_numbers_for_json() -> None:
    assert [six_digits(value) for value in (1 / 3, 2e9, math.nan, math.inf)] == [0.333333, 2e9, None, None]


def test_a_long_list_is_cut() -> None:
    assert [listed("abcd"[:n], 2) for n in range(5)] == ["", "a", "a, b", "a, b and 1 more", "a, b and 2 more"]


def test_bytes_and_round_numbers() -> None:
    assert [in_bytes(n) for n in (0, 1, 1023, 1024, 1536, 25 << 20, 7 << 40)] == [
        "0 B", "1 B", "1023 B", "1 KiB", "1.5 KiB", "25 MiB", "7.0 TiB",
    ]  # fmt: skip
    assert [round_number(n) for n in (0, 0.05, 1, 1.5, 3, 10, 11, 51, 5000)] == [1, 1, 1, 2, 5, 10, 20, 100, 5000]


@pytest.mark.parametrize(
    ("values", "picture"),
    [([], ""), ([1.0], "▁"), ([2.0, 1.0], "█▁"), ([1.0] * 3, "▁▁▁"), ([0.0, math.nan, 7.0], "▁!█"), ([math.nan], "!")],
)
def test_the_shape_of_a_loss(values: list[float], picture: str) -> None:
    assert sparkline(values) == picture


def test_a_long_loss_fits_a_line() -> None:
    assert len(sparkline([math.cos(i / 50) for i in range(1000)])) == 40


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.0, "0 ms"), (0.0124, "12 ms"), (1.234, "1.23 s"), (42.4, "42 s"), (59.7, "1 min"), (200, "3 min 20 s"),
        (7800, "2 h 10 min"), (273600, "3 days 4 h"),
    ],
)  # fmt: skip
def test_durations(seconds: float, told: str) -> None:
    assert in_time(seconds) == told


def test_rates() -> None:
    assert [in_flops(rate) for rate in (2.0, 4.92e5, 1.5e9, 9.894e14, 2.25e15)] == [
        "2 FLOP/s", "492 kFLOP/s", "1.5 GFLOP/s", "989 TFLOP/s", "2,250 TFLOP/s",
    ]  # fmt: skip
