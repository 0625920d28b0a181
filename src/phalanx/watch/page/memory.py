"""A rank's memory by what it is for, step by step: what was last told goes on."""

from __future__ import annotations

from typing import Any

import numpy as np

from phalanx.watch.page.grid import thinned
from phalanx.watch.page.table import RunTable
from phalanx.watch.page.views import Window

PARTS = ("weights", "gradients", "optimizer", "activations", "other")
"""From the lowest of the stacked areas to the highest; those that nobody knows come between."""
WHOLES = ("now", "peak")
"""Not a part: the sum of all, as it was at the end of a step, and at most."""


def ranks(table: RunTable) -> list[int]:
    """Those that told anything of their memory."""
    return sorted({rank for each in table.memory.values() for rank in each.ranks})


def memory(table: RunTable, rank: int, window: Window) -> dict[str, Any]:
    """Of one rank, bytes in each bucket of steps: of a part the most, and of the whole."""
    known, width, last = ranks(table), window.width, window.last
    rank = rank if rank in known or not known else known[0]
    parts = [*PARTS, *sorted(table.memory.keys() - set(PARTS) - set(WHOLES))]
    begin = window.first - window.first % width
    found = {}
    for part in [part for part in [*parts, *WHOLES] if part in table.memory]:
        values = table.memory[part].within(rank, begin, last)
        if np.isfinite(values).any():
            most = thinned(values, begin, width)[1].tolist()
            found[part] = [None if np.isnan(value) else int(value) for value in most]
    return {
        "version": table.version, "rank": rank, "ranks": known, "steps": np.arange(begin, last, width).tolist(),
        "width": width, "first": window.first, "last": last,
        "wholes": {part: found.pop(part) for part in WHOLES if part in found}, "parts": found,
    }  # fmt: skip
