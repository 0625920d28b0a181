"""The chart: what goes down is drawn down, in braille or in ASCII."""

from __future__ import annotations

import math

import pytest

from phalanx.watch.chart import HEIGHT, WIDTH, chart, shows


def test_a_loss_that_falls() -> None:
    lines = chart([1 - step / 600 for step in range(600)])
    assert len(lines) == HEIGHT + 1
    assert lines[0].startswith("0.9967 │⠉")
    assert lines[HEIGHT - 1].startswith(" 0.005 │")
    assert lines[-1].endswith("step 600")
    assert "└ step 1 " in lines[-1]
    ends = [len(line) for line in lines[:HEIGHT]]
    assert ends == sorted(set(ends)), "further down is further right"
    assert max(ends) == len(lines[-1]) == WIDTH + 8


def test_plain_characters_where_there_are_no_others() -> None:
    lines = chart([4, 3, 2, 1, 0], first=7, encoding="ascii")
    assert lines == ["4 |'.", "  | '.", "  |  '.", "  |   :", "0 |    :", "  + step 7  step 11"]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_what_is_no_number_leaves_a_gap(encoding: str) -> None:
    assert chart([], encoding=encoding) == []
    assert chart([math.nan, math.inf], encoding=encoding) == []
    lines = chart([1.0, math.nan, 1.0], encoding=encoding)
    assert len(lines) == HEIGHT + 1
    assert lines[0].startswith("1 ")


def test_which_characters_an_output_has() -> None:
    assert shows("⣿", "utf-8")
    assert not shows("⣿", "ascii")
    assert not shows("⣿", "latin-1")
    assert not shows("a⣿", None)
    assert not shows("a", "no such encoding")
