"""Checks of what a JSON file holds."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.schema import (
    anything,
    each,
    is_count,
    is_flag,
    is_number,
    is_plain,
    is_text,
    is_whole,
    maybe,
    record,
    row,
    short,
    table,
)

HELD: list[tuple[Any, list[Any], list[Any]]] = [
    (is_count, [0, 7, 1 << 60], [-1, True, 1.0, "1", None, 1 << 61]),
    (is_whole, [-7, 1 << 70], [True, 1.0, "1"]),
    (is_number, [0, -1.5, float("inf")], [True, "1", None]),
    (is_text, ["", "a"], [b"a", 1, None]),
    (is_flag, [True, False], [0, None]),
    (is_plain, [1, "a", None, True, [1, "a"]], [{}, [[1]], [{}]]),
    (anything, [{}, None], []),
    (maybe(is_text), [None, "a"], [1]),
    (each(is_text), [[], ["a"]], ["a", [1], {}, ("a",)]),
    (table(is_text), [{}, {"a": "b"}], [[], {"a": 1}]),
    (row(is_text, is_count), [["a", 1]], [["a"], ["a", 1, 1], [1, "a"], "a1", {}]),
    (
        record({"a": is_text}, {"b": is_count}),
        [{"a": "x"}, {"a": "x", "b": 1}],
        [{}, {"b": 1}, {"a": 1}, [], {"a": "x", "c": 1}],
    ),
]


@pytest.mark.parametrize("number", range(len(HELD)))
def test_what_passes_and_what_does_not(number: int) -> None:
    check, good, bad = HELD[number]
    assert all(map(check, good))
    assert not any(map(check, bad))


def test_a_value_is_told_in_a_line() -> None:
    assert short("a" * 99) == repr("a" * 60)
    assert "\n" not in short("a\nb")
