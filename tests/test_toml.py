"""TOML: whatever a setting holds reads back as it was."""

from __future__ import annotations

import math
import os
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.toml import from_toml, to_toml

TEXT = st.text(st.characters(), max_size=20)  # control characters and lone surrogates among them
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
PLAIN = st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False), TEXT)
TABLES = st.dictionaries(NAMES, st.dictionaries(NAMES, PLAIN | st.lists(PLAIN, max_size=3), max_size=4), max_size=3)


@given(TABLES)
def test_what_is_written_reads_back(tables: dict[str, dict[str, Any]]) -> None:
    text = to_toml(tables)
    text.encode()
    read = from_toml(text)
    assert read == tables
    assert [[type(v) for v in t.values()] for t in read.values()] == [
        [type(v) for v in t.values()] for t in tables.values()
    ]


@pytest.mark.parametrize("value", ["\x7f", "\x00\n\r\t\x1b", os.fsdecode(b"caf\xe9"), 'a "b" \\', "größe", "\u2028"])
def test_odd_text_reads_back(value: str) -> None:
    assert from_toml(to_toml({"größe": {"größe": value, "a b": [value, 1]}})) == {
        "größe": {"größe": value, "a b": [value, 1]}
    }


def test_nothing_is_left_out_and_not_a_number_stays() -> None:
    read = from_toml(to_toml({"a": {"none": None, "nan": math.nan, "inf": -math.inf}}))
    assert list(read["a"]) == ["nan", "inf"]
    assert math.isnan(read["a"]["nan"])


def test_usual_text_is_usual_toml() -> None:
    tables = {"run": {"task": "gpt", "timeout": 600.0}, "settings": {"width": 24, "name": "größe"}}
    assert tomllib.loads(to_toml(tables)) == tables


@pytest.mark.parametrize(
    "value",
    [
        {}, {"a": {"b": [1, {"c": None}]}}, {"a b": 1.5, "c.d": True, "größe": ""}, {"bytes": "ff"}, {"bytes": 3},
        {"bytes": {"bytes": "zz"}}, {"none": False}, [None, [], {}], {"x": os.fsdecode(b"caf\xe9")}, {"none": None},
    ],
)  # fmt: skip
def test_nested_values_read_back(value: Any) -> None:
    assert from_toml(to_toml({"a": {"b": value}})) == {"a": {"b": value}}
