"""TOML, which the standard library reads but does not write: tables of plain values that read back as they were."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

BYTES = "bytes"
"""Text that no encoding has, such as a path that is not UTF-8, is a table with this one key: its bytes in hex."""
NONE = "none"
"""None inside of another value is a table with this one key, which is true."""


_DEEP = re.compile(r"""(?<![\w-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){40}""")
"""A name of so many parts: `tomllib` takes a time for it that grows with their square."""


def to_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """A table a section. Values that are None are left out; those inside of another value are kept."""
    lines: list[str] = []
    for table, values in tables.items():
        lines.append(f"[{_key(table)}]")
        lines.extend(f"{_key(name)} = {_value(value)}" for name, value in values.items() if value is not None)
        lines.append("")
    return "\n".join(lines)


def from_toml(text: str) -> dict[str, Any]:
    """What `to_toml` was given; ``tomllib.TOMLDecodeError`` if it is no TOML, or has names of 40 parts."""
    if deep := _DEEP.search(text):
        raise tomllib.TOMLDecodeError(f"a name of too many parts (at line {text.count(chr(10), 0, deep.start()) + 1})")
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
    if isinstance(value, Mapping):
        marked = value.keys() == {BYTES} and isinstance(value[BYTES], str)
        items = ((_key(str(name)), _bytes(item) if marked else _value(item)) for name, item in value.items())
        return "{" + ", ".join(f"{name} = {item}" for name, item in items) + "}"
    if value is None:
        return f"{{{NONE} = true}}"
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        return _bytes(text)
    return _text(text)


def _bytes(text: str) -> str:
    return f'{{{BYTES} = "{text.encode(errors="surrogatepass").hex()}"}}'


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return [_read(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {BYTES} and isinstance(value[BYTES], str):
        return bytes.fromhex(value[BYTES]).decode(errors="surrogatepass")
    if value == {NONE: True} and value[NONE] is True:
        return None
    return {name: _read(item) for name, item in value.items()}
