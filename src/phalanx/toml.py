"""TOML, which the standard library reads but does not write: tables of plain values that read back as they were."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

BYTES = "bytes"
"""Text that no encoding has, such as a path that is not UTF-8, is a table with this one key: its bytes in hex."""


def to_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """A table a section. Values that are None are left out."""
    lines: list[str] = []
    for table, values in tables.items():
        lines.append(f"[{_key(table)}]")
        lines.extend(f"{_key(name)} = {_value(value)}" for name, value in values.items() if value is not None)
        lines.append("")
    return "\n".join(lines)


def from_toml(text: str) -> dict[str, Any]:
    """What `to_toml` was given; ``tomllib.TOMLDecodeError`` if it is no TOML."""
    return {name: _read(value) for name, value in tomllib.loads(text).items()}


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        return f'{{{BYTES} = "{text.encode(errors="surrogatepass").hex()}"}}'
    return _text(text)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return [_read(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {BYTES} and isinstance(value[BYTES], str):
        return bytes.fromhex(value[BYTES]).decode(errors="surrogatepass")
    return {name: _read(item) for name, item in value.items()}
