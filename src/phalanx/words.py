"""Numbers and lists as people read them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that do something on a terminal, or turn the order of what is read; a tab and a line break are none."""


def many(number: int, one: str, more: str = "") -> str:
    """``1 step``, ``2 steps``, ``1,000 steps``."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def printable(text: str, one_line: bool = False) -> str:
    """A text for a terminal: characters that control it are shown as ``\\x1b``. ``one_line``: line breaks are too."""
    shown = _CONTROLS.sub(lambda found: _escaped(found[0]), text)
    return shown.replace("\n", "\\n").replace("\t", "\\t") if one_line else shown


def _escaped(letter: str) -> str:
    return f"\\x{ord(letter):02x}" if ord(letter) < 256 else f"\\u{ord(letter):04x}"


def listed(names: Sequence[str], most: int) -> str:
    """``a, b``, ``a, b and 3 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def ranks_named(ranks: Sequence[int], most: int = 8) -> str:
    """``rank 3``, ``ranks 0, 1 and 6 more``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed([str(rank) for rank in ranks], most)}"


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """A table's lines: columns side by side, those in ``right`` flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{c:>{w}}" if n in right else f"{c:<{w}}" for n, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def in_flops(rate: float) -> str:
    """``12.3 GFLOP/s``, ``989 TFLOP/s``."""
    for unit in ("", "k", "M", "G"):
        if rate < 1000:
            return f"{rate:.3g} {unit}FLOP/s"
        rate /= 1000
    return f"{rate:.3g} TFLOP/s" if rate < 1000 else f"{rate:,.0f} TFLOP/s"


def in_bytes(number: float) -> str:
    """``0 B``, ``1.5 KiB``, ``24 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.3g} {unit}" if number < 100 else f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:,.1f} TiB"


def in_time(seconds: float) -> str:
    """``120 ms``, ``1.25 s``, ``42 s``, ``3 min 20 s``, ``2 h 10 min``, ``3 days 4 h``."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 59.5:
        return f"{seconds:.0f} s" if seconds >= 9.995 else f"{seconds:.3g} s"
    for small, large, names in ((1, 60, ("min", "s")), (60, 60, ("h", "min")), (3600, 24, ("days", "h"))):
        whole, rest = divmod(round(seconds / small), large)
        if whole < 60 or small == 3600:
            return f"{whole} {names[0]}" + (f" {rest} {names[1]}" if rest else "")
    raise AssertionError("days are the last")


def valid_json(value: object) -> str:
    """A value as JSON, which has no word for numbers that are not finite: they become null."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, (list, tuple)) else value


def six_digits(value: float) -> float | None:
    """For JSON, which has no word for what is not finite."""
    return float(f"{float(value):.6g}") if math.isfinite(value) else None


def round_number(least: float) -> int:
    """The next of 1, 2, 5, 10, 20, 50 and so on that is no less."""
    unit = 1
    while True:
        for digit in (1, 2, 5):
            if digit * unit >= least:
                return digit * unit
        unit *= 10


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Values as a row of bars: a picture of how the loss went."""
    if not values:
        return ""
    size = max(1, len(values) / width)
    groups = [
        values[int(i * size) : max(int(i * size) + 1, int((i + 1) * size))] for i in range(min(width, len(values)))
    ]
    means = [sum(group) / len(group) for group in groups]
    finite = [m for m in means if m == m and abs(m) != float("inf")]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    span = (high - low) or 1.0
    return "".join(BLOCKS[round((m - low) / span * 7)] if m in finite else "!" for m in means)


def digits(text: str) -> int | None:
    """A count written in plain digits, and not too many of them; None: it is none."""
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None


def bits(rate: float) -> str:
    """Bytes a second, as links are called: ``8 Gbit/s``, ``95 Mbit/s``."""
    return f"{rate * 8e-9:.3g} Gbit/s" if rate >= 1.25e7 else f"{rate * 8e-6:.3g} Mbit/s"
