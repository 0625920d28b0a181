"""Numbers over steps, drawn in a few lines of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

WIDTH, HEIGHT = 60, 5
"""In characters, without the labels."""
BRAILLE = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Of a character of braille, by row and column."""


def shows(text: str, encoding: str | None) -> bool:
    """Whether an output of this encoding has these characters."""
    try:
        text.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def chart(values: Sequence[float], first: int = 1, encoding: str | None = "utf-8") -> list[str]:
    """Lines of it: the mean of as many steps as share a column, from the largest to the least that is drawn.

    ``first``: the number of the first step. In braille, or in ASCII where the output has no more. What is not finite
    leaves a gap; nothing to draw gives no lines.
    """
    fine = shows(chr(BRAILLE), encoding)
    across, down = (2, 4) if fine else (1, 2)
    columns = _means(values, WIDTH * across)
    drawn = [value for value in columns if value is not None]
    if not drawn:
        return []
    low, high = min(drawn), max(drawn)
    rows = HEIGHT * down
    places = [None if v is None else _place(v, low, high, rows) for v in columns]
    cells = [[0] * math.ceil(len(places) / across) for _ in range(HEIGHT)]
    for column, place in enumerate(places):
        for row in _stroke(places[column - 1] if column else None, place):
            cells[row // down][column // across] |= DOTS[row % down][column % across]
    labels = [f"{high:.4g}", *[""] * (HEIGHT - 2), f"{low:.4g}"]
    wide = max(map(len, labels))
    bar, corner = ("│", "└") if fine else ("|", "+")
    lines = [f"{label:>{wide}} {bar}{_spelled(row, fine)}".rstrip() for label, row in zip(labels, cells, strict=True)]
    last = f"step {first + len(values) - 1}"
    begin = f"{'':>{wide}} {corner} step {first}"
    return [*lines, f"{begin}{last:>{max(len(last) + 2, wide + 2 + len(cells[0]) - len(begin))}}"]


def _means(values: Sequence[float], most: int) -> list[float | None]:
    """Of neighbours, for there to be at most so many."""
    size = max(1.0, len(values) / most)
    found: list[float | None] = []
    for index in range(min(most, len(values))):
        begin = int(index * size)
        group = [v for v in values[begin : max(begin + 1, int((index + 1) * size))] if math.isfinite(v)]
        found.append(sum(group) / len(group) if group else None)
    return found


def _place(value: float, low: float, high: float, rows: int) -> int:
    """From 0, the top."""
    return round((high - value) / (high - low) * (rows - 1)) if high > low else rows - 1


def _stroke(before: int | None, now: int | None) -> range:
    """The rows of a column that are drawn: its own, and those that lead to it."""
    if now is None:
        return range(0)
    if before is None or abs(before - now) <= 1:
        return range(now, now + 1)
    return range(before + 1, now + 1) if before < now else range(now, before)


def _spelled(row: Sequence[int], fine: bool) -> str:
    """In ASCII a character has an upper and a lower dot."""
    if fine:
        return "".join(chr(BRAILLE + dots) for dots in row).rstrip(chr(BRAILLE))
    return "".join({0: " ", 1: "'", 2: ".", 3: ":"}[dots] for dots in row)
