"""What the page asks for, as plain objects: charts, the map of ranks by steps, and spans of a few steps."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.watch.page.grid import bucket_width, thinned
from phalanx.watch.page.table import RunTable
from phalanx.words import six_digits

MOST_ROWS = 256
"""So many ranks the map shows by themselves; of more than that several share a row."""
MOST_SPANS = 30_000
MOST_LANES = 64
"""So many ranks the time line shows; of more than that some, spread evenly."""
MOST_STEPS = 60
"""So many steps the time line shows: of more than that the last."""
OWN_TIME = "own"
WAITS = ("wait", "reduce")
"""Phases in which a rank does little but wait for others."""
BRIGHTEST = 0.995
"""This share of cells is told apart by its colour; the few above it have the brightest, as few below it the least."""


@dataclass(frozen=True)
class Window:
    """Steps ``first`` up to ``last``, in so many columns of a screen."""

    first: int
    last: int
    columns: int

    @classmethod
    def of(cls, table: RunTable, asked: Mapping[str, int]) -> Window:
        last = min(asked.get("last", table.steps), max(table.steps, 1))
        first = max(0, min(asked.get("first", 0), last - 1))
        return cls(first, last, max(10, min(asked.get("columns", 800), 4000)))

    @property
    def width(self) -> int:
        """Of a bucket, in steps."""
        return bucket_width(self.last - self.first, self.columns)


def charts(table: RunTable, window: Window, since: int | None = None, width: int = 0) -> dict[str, Any]:
    """Every number by step, its least and its most in each bucket.

    ``since`` and ``width``: whoever asks has that version in buckets of that width, and is told what is new.
    """
    begin = window.first
    if since is not None and width == window.width:
        begin = max(begin, min(table.changed(since), window.last))
    begin -= begin % window.width
    at = np.arange(begin, window.last, window.width)
    found = {name: _both(values, begin, window.width) for name, values in _series(table, begin, window.last)}
    return {
        "version": table.version, "first": window.first, "last": window.last, "width": window.width, "begin": begin,
        "steps": at.tolist(), "series": found,
    }  # fmt: skip


def _series(table: RunTable, first: int, last: int) -> Iterator[tuple[str, np.ndarray]]:
    """Those that have any number, one after another: all together may be large."""
    for name, values in _every_series(table, first, last):
        if not np.isnan(values).all():
            yield name, values


def _every_series(table: RunTable, first: int, last: int) -> Iterator[tuple[str, np.ndarray]]:
    for name, grid in table.shared.items():
        if name != "skipped":
            yield name, grid.within(first, last, 1)[0]
    seconds = sum(
        (np.nan_to_num(grid.within(first, last, table.ranks)) for grid in table.seconds.values()), np.zeros(())
    )
    if table.ranks and last > first:
        gaps = np.isnan(table.ended.within(first, last))
        yield "seconds a step", np.where(gaps.all(0), np.nan, np.where(gaps, 0.0, seconds).max(0))
        yield from _rates(table, first, last).items()
    for what, grids in (("sent", table.sent), ("exposed", table.exposed)):
        for axis, grid in grids.items():  # a mean: what a killed rank had not written yet is not known
            values = grid.within(first, last, table.ranks)
            known = np.isfinite(values).sum(0)
            yield f"{what}/{axis}", np.where(known, np.nansum(values, 0) / np.maximum(known, 1), np.nan)


def _rates(table: RunTable, first: int, last: int) -> dict[str, np.ndarray]:
    """Samples, and terms of the loss, a second: from the end of a step to that of the next, unless ranks restarted."""
    ended = table.ended.within(max(0, first - 1), last, 1)[0]
    spent = np.diff(ended, prepend=np.nan if first == 0 else [])
    restarts = [int(event.get("step", 0)) for event in table.moments if event["kind"] == "start"]
    spent[[step - first for step in restarts if first <= step < last]] = np.nan
    spent[spent <= 0] = np.nan
    found = {}
    for name, counted in (("samples a second", "slots"), ("terms a second", "count")):
        if counted in table.shared:
            found[name] = table.shared[counted].within(first, last, 1)[0] / spent
    if len(found) == 2 and np.array_equal(found["samples a second"], found["terms a second"], equal_nan=True):
        del found["terms a second"]
    return found


def _both(values: np.ndarray, first: int, width: int) -> dict[str, list[float | None]]:
    low, high = thinned(values, first, width)
    return {"low": _plain(low)} | ({} if np.array_equal(low, high, equal_nan=True) else {"high": _plain(high)})


def _plain(values: np.ndarray) -> list[float | None]:
    return [six_digits(value) for value in values.tolist()]


def heat(table: RunTable, window: Window, phase: str = OWN_TIME) -> dict[str, Any]:
    """Of every rank the longest step in each column, as two bytes a cell: 0 where there is none, the most 65535."""
    seconds = phase_seconds(table, phase, window.first, window.last)
    _, cells = thinned(seconds, window.first, window.width)
    share = -(-max(1, table.ranks) // MOST_ROWS)
    _, cells = (each.T for each in thinned(cells.T, 0, share))
    known = cells[np.isfinite(cells)]
    low, top = np.quantile(known, [1 - BRIGHTEST, BRIGHTEST]).tolist() if known.size else (0.0, 0.0)
    low = min(low, top / 2)  # or what is much alike would look as if it were not
    least, most = (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)
    scaled = np.nan_to_num((cells - least) / ((most - least) or 1.0)) * 65534 + 1
    shown = np.where(np.isfinite(cells), np.rint(scaled), 0).astype("<u2")
    return {
        "version": table.version, "phase": phase, "phases": phases(table), "first": window.first,
        "last": window.last, "width": window.width, "rows": cells.shape[0], "columns": cells.shape[1],
        "ranks_a_row": share, "low": low, "top": top, "least": least, "most": most,
        "cells": base64.b64encode(shown.tobytes()).decode(), "ranks": _by_rank(seconds, window.first),
    }  # fmt: skip


def phases(table: RunTable) -> list[str]:
    """Of which the map can be, the first of them if nothing is asked for."""
    return [OWN_TIME, "total", *table.phases]


def phase_seconds(table: RunTable, phase: str, first: int, last: int) -> np.ndarray:
    """Of every rank and step; ``total``: of all phases together; ``own``: without what a rank waited for others."""
    if phase == OWN_TIME:
        return _own_seconds(table, first, last)
    if phase != "total":
        grid = table.seconds.get(phase)
        return np.full((table.ranks, last - first), np.nan) if grid is None else grid.within(first, last, table.ranks)
    parts = (np.nan_to_num(grid.within(first, last, table.ranks)) for grid in table.seconds.values())
    total = sum(parts, np.zeros((table.ranks, max(0, last - first)), np.float32))
    return np.where(np.isnan(table.ended.within(first, last, table.ranks)), np.nan, total)


def _own_seconds(table: RunTable, first: int, last: int) -> np.ndarray:
    """Where it is not noted how long a rank stood waiting, the phases in which it does little else are left out."""
    found = phase_seconds(table, "total", first, last)
    waits = sum(
        (np.nan_to_num(phase_seconds(table, phase, first, last)) for phase in WAITS), np.zeros(found.shape, np.float32)
    )
    noted, exposed = np.zeros(found.shape, bool), np.zeros(found.shape, np.float32)
    for grid in table.exposed.values():
        own = grid.within(first, last, table.ranks)
        noted |= np.isfinite(own)
        exposed += np.nan_to_num(own)
    waits = np.where(noted, exposed, waits)
    return np.maximum(found - waits, 0.0)


def _by_rank(seconds: np.ndarray, first: int) -> list[dict[str, Any]]:
    """For a table: what is usual for each rank, the longest, and in which step that was."""
    found = []
    for rank, own in enumerate(seconds[:MOST_ROWS]):
        known = own[np.isfinite(own)]
        if known.size:
            at = int(np.nanargmax(own))
            usual, most = six_digits(np.median(known)), six_digits(own[at])
            found.append({"rank": rank, "usual": usual, "most": most, "step": first + at + 1})
    return found


def spans(table: RunTable, window: Window) -> dict[str, Any]:
    """Of some steps of some ranks: when each began, and how long each of its phases took, one after another."""
    ranks = np.unique(np.linspace(0, max(0, table.ranks - 1), min(table.ranks, MOST_LANES)).astype(int))
    phases = table.phases
    room = max(1, MOST_SPANS // max(1, len(ranks) * max(1, len(phases))))
    first = max(window.first, window.last - min(MOST_STEPS, room))
    ended = table.ended.within(first, window.last, table.ranks)[ranks]
    took = [np.nan_to_num(table.seconds[phase].within(first, window.last, table.ranks)[ranks]) for phase in phases]
    begun = ended - sum(took, np.zeros(()))
    zero = float(np.nanmin(begun)) if np.isfinite(begun).any() else 0.0
    rows = []
    for row, rank in enumerate(ranks):
        own = [
            [first + at, round(float(begun[row, at] - zero), 6), *(round(float(each[row, at]), 6) for each in took)]
            for at in range(window.last - first)
            if math.isfinite(begun[row, at])
        ]
        rows.append({"rank": int(rank), "steps": own})
    end = float(np.nanmax(ended)) if np.isfinite(ended).any() else 0.0
    saved = [
        {"rank": event["rank"], "step": event["step"], "seconds": event["seconds"],
         "begun": event["time"] - event["seconds"] - zero}
        for event in table.moments
        if event["kind"] == "checkpoint" and "seconds" in event and zero < event["time"] < end + event["seconds"]
    ]  # fmt: skip
    return {
        "version": table.version, "first": first, "last": window.last, "asked": window.first, "phases": phases,
        "rows": rows, "of_ranks": table.ranks, "checkpoints": saved, "seconds": round(end - zero, 6),
    }  # fmt: skip
