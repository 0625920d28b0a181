"""Plain objects as YAML, for people to read and kubectl to take: dictionaries, lists, texts, numbers, yes and no."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PLAIN = re.compile(r"(--?)?[A-Za-z/][\w./@+-]*([:=][\w./@+-]+)*")
"""Texts that need no quotes, those aside that YAML takes for something else."""
OTHERWISE_MEANT = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


def to_yaml(documents: Sequence[Mapping[str, Any]]) -> str:
    """One document after another."""
    return "---\n".join("\n".join(_lines(each)) + "\n" for each in documents)


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            if isinstance(inner, (Mapping, list, tuple)) and inner:
                yield f"{_scalar(name)}:"
                yield from (f"  {line}" for line in _lines(inner))
            else:
                yield f"{_scalar(name)}: {_scalar(inner)}"
    elif isinstance(value, (list, tuple)) and value:
        for inner in value:
            first, *rest = _lines(inner)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)
    else:
        yield _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and PLAIN.fullmatch(value) and value.lower() not in OTHERWISE_MEANT:
        return value
    return json.dumps(value, ensure_ascii=False)  # YAML reads JSON
