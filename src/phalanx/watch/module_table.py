"""A profile by module: what ranks saw put together, alike blocks folded, as a table and as JSON."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.files import write_whole
from phalanx.words import columns, in_bytes, listed, many

MOST_ROWS = 32
SUMMED = ("forward_flops", "backward_flops")
"""Of a module over ranks: each computes its part. Of the rest, the rank that has most says it."""
NUMBERS = (
    "calls",
    "recomputed",
    "forward_ms",
    "backward_ms",
    "forward_flops",
    "backward_flops",
    "output_bytes",
    "weights",
)
CONTAINERS = ("ModuleList", "ModuleDict")
"""Modules that nobody calls."""
Row = dict[str, Any]


def module_part_path(run: Path, rank: int) -> Path:
    """Where a rank leaves what it saw."""
    return run / "profile" / "modules" / f"rank-{rank:05d}.json"


def conclude_modules(run: Path) -> str | None:
    """Put together what ranks have left, and say what it shows; None: they left nothing."""
    folder = run / "profile" / "modules"
    found: list[Mapping[str, Any]] = []
    for path in sorted(folder.glob("rank-*.json")):
        with suppress(OSError, ValueError):
            found.append(json.loads(path.read_text()))
    if not found:
        return None
    rows = joined([part["modules"] for part in found])
    text = "\n".join([*_words(found, rows), f"all modules: {folder}.json"]) + "\n"
    kept = {"step": found[0]["step"], "ranks": [part["rank"] for part in found], "layout": found[0]["layout"]}
    notes = list(dict.fromkeys(note for part in found for note in part["notes"]))
    outside = sum(part["outside_flops"] for part in found)
    write_whole(
        Path(f"{folder}.json"),
        json.dumps({**kept, "outside_flops": outside, "modules": rows, "notes": notes}, indent=1) + "\n",
    )
    write_whole(Path(f"{folder}.txt"), text)
    shutil.rmtree(folder)
    return text


def joined(ranks: Sequence[Sequence[Row]]) -> list[Row]:
    """One row a module, of all ranks."""
    found: dict[str, Row] = {}
    for rows in ranks:
        for row in rows:
            known = found.setdefault(row["name"], {**row, **dict.fromkeys(NUMBERS, 0)})
            for name in NUMBERS:
                known[name] = known[name] + row[name] if name in SUMMED else max(known[name], row[name])
    return list(found.values())


def folded(rows: Iterable[Row]) -> list[Row]:
    """Blocks that are alike, and each part of theirs, as one row: ``blocks.*.mlp``."""
    rows = list(rows)
    kinds: dict[str, set[str]] = {}
    numbers: dict[str, int] = {}
    for row in rows:
        parent, _, last = row["name"].rpartition(".")
        if last.isdigit():
            kinds.setdefault(parent, set()).add(row["kind"])
            numbers[parent] = numbers.get(parent, 0) + 1
    alike = {parent for parent, own in kinds.items() if len(own) == 1 and numbers[parent] > 1}
    found: dict[str, Row] = {}
    for row in rows:
        words = row["name"].split(".") if row["name"] else []
        key = ".".join("*" if w.isdigit() and ".".join(words[:n]) in alike else w for n, w in enumerate(words))
        known = found.setdefault(key, {**row, **dict.fromkeys(NUMBERS, 0), "name": key, "count": 0})
        known["count"] += 1
        for name in NUMBERS:
            known[name] += row[name]
    return list(found.values())


def readable(rows: Sequence[Row], most: int = MOST_ROWS) -> list[Row]:
    """As many levels of the tree as fit."""
    shown: list[Row] = []
    for depth in range(1 + max((_depth(row) for row in rows), default=0)):
        deeper = [row for row in rows if _depth(row) <= depth]
        if shown and len(deeper) > most:
            break
        shown = deeper
    return shown


def _depth(row: Row) -> int:
    return 1 + row["name"].count(".") - row["name"].count(".*") if row["name"] else 0


def _words(found: Sequence[Mapping[str, Any]], rows: Sequence[Row]) -> Iterator[str]:
    first = found[0]
    ranks = f"{many(len(found), 'rank')} of {first['world']}"
    yield f"profile by module of step {first['step']} on {ranks} ({first['layout']})"
    yield "times are those of the rank that took longest, FLOPs those of all ranks; a module's have those of its parts"
    outside = sum(part["outside_flops"] for part in found)
    whole = sum(row["forward_flops"] + row["backward_flops"] for row in rows if not row["name"]) + outside
    every = folded(row for row in rows if row["calls"] or row["kind"] not in CONTAINERS)
    shown = readable(every)
    table = [["module", "kind", "calls", "forward ms", "backward ms", "FLOPs", "share", "weights", "outputs"]]
    for row in shown:
        flops = row["forward_flops"] + row["backward_flops"]
        again = f" + {row['recomputed']}" if row["recomputed"] else ""
        table.append([
            "  " * _depth(row) + (re.sub(r"^.*\.(?!\*)", "", row["name"]) or "(model)"),
            f"{row['count']} x {row['kind']}" if row["count"] > 1 else row["kind"], f"{row['calls']:,}{again}",
            f"{row['forward_ms']:.2f}", f"{row['backward_ms']:.2f}", _flops(flops, whole),
            f"{100 * flops / whole:.1f} %" if whole else "", f"{row['weights']:,}", in_bytes(row["output_bytes"]),
        ])  # fmt: skip
    if outside:
        table.append(
            ["(loss and update)", "", "", "", "", _flops(outside, whole), f"{100 * outside / whole:.1f} %", "", ""]
        )
    yield from ["", *columns(table, right=range(2, 9)), ""]
    if len(shown) < len(every):
        yield f"note: {many(len(every) - len(shown), 'row')} of smaller parts are not shown"
    missing = sorted(set(range(first["world"])) - {part["rank"] for part in found})
    if missing:
        yield f"note: of rank {listed([str(rank) for rank in missing], 8)} there is nothing"
    yield from (f"note: {note}" for note in dict.fromkeys(note for part in found for note in part["notes"]))


def _flops(number: float, whole: float) -> str:
    if not whole:
        return "not counted"
    for unit in ("", " K", " M", " G", " T"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:,.3g} P"
