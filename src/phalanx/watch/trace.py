"""Ranks' traces of some steps, merged into one on one clock, for Perfetto and chrome://tracing."""

from __future__ import annotations

import gzip
import heapq
import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from phalanx.files import opened
from phalanx.words import listed, many

MARK = "phalanx clock"
"""A range that a rank has timed itself."""
MOST_EVENTS = 1_000_000
"""In one merged trace: viewers hold all of them in memory."""
PHASES = ("X", "M", "s", "f", "i")
"""Of Chrome's format: ranges, names, arrows and moments."""

Event = dict[str, Any]


def part_path(run: Path, name: str, rank: int) -> Path:
    """Where a rank leaves its own trace."""
    return run / "profile" / name / f"rank-{rank:05d}.json.gz"


@dataclass(frozen=True)
class RankTrace:
    """A rank's trace: what it says of itself, and its events."""

    facts: Mapping[str, Any]
    events: list[Event]
    base_us: float
    """What its clock begins at, in microseconds since 1970."""

    @classmethod
    def read(cls, path: Path) -> RankTrace:
        """Raises ValueError, KeyError or OSError where it is not whole."""
        try:
            with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
                read = json.load(file, strict=False)
        except EOFError as error:
            raise ValueError(str(error)) from error
        facts, events = read["phalanx"], read["traceEvents"]
        marks = [event for event in events if event.get("name") == MARK and event.get("ph") == "X"]
        by_time = sorted(marks, key=lambda event: float(event["ts"]))
        pairs = zip(by_time, facts["marks"], strict=True)
        mark, (before, after) = min(pairs, key=lambda pair: pair[1][1] - pair[1][0])
        middle = float(mark["ts"]) + float(mark.get("dur", 0)) / 2
        base = (before + after) / 2000 - middle - facts["ahead_ns"] / 1000
        return cls(facts, [event for event in events if _counts(event)], base)

    @property
    def rank(self) -> int:
        return int(self.facts["rank"])

    @property
    def label(self) -> str:
        return f"rank {self.rank} on {self.facts['host']}"


def _counts(event: Event) -> bool:
    """Whether it is of a process or a GPU, and not of the profiler itself."""
    return isinstance(event.get("pid"), int) and event.get("name") != MARK and event.get("ph") in PHASES


def parts(folder: Path) -> Iterator[RankTrace]:
    """By rank; one that is not whole is left out."""
    for path in sorted(folder.glob("rank-*.json.gz")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            yield RankTrace.read(path)


class MergedTrace:
    """One trace in the making: a file of its own until it is whole."""

    def __init__(self, path: Path, share: int) -> None:
        """``share``: so many events a rank may have, its longest."""
        self.path, self.share, self.base_us = path, share, 0.0
        self.thinned: list[int] = []
        """Ranks that had more."""
        self._unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}.unfinished")
        self._file: IO[str] | None = None
        self._pids = 0

    def add(self, part: RankTrace) -> None:
        if self._file is None:
            self.base_us = part.base_us
            opened(self._unfinished, "xb").close()
            self._file = gzip.open(self._unfinished, "wt", encoding="utf-8", compresslevel=5)  # noqa: SIM115
            self._file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        events = self._thinned(part)
        pids: dict[str, int] = {}
        for event in events:
            if event["ph"] != "M":
                pids.setdefault(str(event.get("pid")), self._pids + len(pids) + 1)
        lines = [*self._named(part, pids), *self._moved(part, events, pids)]
        self._file.write("".join(",\n"[: 2 * bool(self._pids or n)] + json.dumps(e) for n, e in enumerate(lines)))
        self._pids += len(pids)

    def _thinned(self, part: RankTrace) -> list[Event]:
        timed = [event for event in part.events if event["ph"] == "X"]
        if len(timed) <= self.share:
            return part.events
        self.thinned.append(part.rank)
        least = heapq.nlargest(self.share, (float(event.get("dur", 0)) for event in timed))[-1]
        kept = [e for e in timed if float(e.get("dur", 0)) >= least or e.get("cat") == "user_annotation"]
        return [*kept, *(event for event in part.events if event["ph"] == "M")]

    def _named(self, part: RankTrace, pids: Mapping[str, int]) -> Iterator[Event]:
        """Processes: that of the rank, and its GPUs."""
        devices = {str(e["pid"]) for e in part.events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")}
        for old, new in pids.items():
            name = f"{part.label}: GPU {old}" if old in devices else part.label
            for what, value in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": new})):
                yield {"ph": "M", "name": what, "pid": new, "tid": 0, "args": value}

    def _moved(self, part: RankTrace, events: list[Event], pids: Mapping[str, int]) -> Iterator[Event]:
        by = part.base_us - self.base_us
        for event in events:
            own = str(event.get("pid"))
            if own not in pids or event.get("name", "").startswith("process_"):
                continue
            moved = {**event, "pid": pids[own]}
            if "ts" in event:
                moved["ts"] = round(float(event["ts"]) + by, 3)
            if "id" in event:
                moved["id"] = f"{part.rank}.{event['id']}"  # else arrows would lead to other ranks
            yield moved

    def close(self) -> None:
        """It is whole."""
        if self._file is not None:
            self._file.write("\n]}\n")
            self._file.close()
            self._unfinished.replace(self.path)

    def discard(self) -> None:
        if self._file is not None:
            self._file.close()
            self._unfinished.unlink(missing_ok=True)


def notes(found: list[Mapping[str, Any]], chosen: list[int], merged: MergedTrace, folder: Path) -> Iterator[str]:
    """What of the ranks that were to be profiled is not in the merged trace."""
    missing = [rank for rank in chosen if rank not in {facts["rank"] for facts in found}]
    if missing:
        named = listed([str(rank) for rank in missing], 8)
        yield f"{many(len(missing), 'rank')} left no whole trace, having been ended before that perhaps: {named}"
    generations = sorted({facts["generation"] for facts in found})
    if len(generations) > 1:
        yield "ranks were started again meanwhile: traces are of several starts, and not of the same moments"
    if merged.thinned:
        named = listed([str(rank) for rank in merged.thinned], 8)
        yield f"only the {merged.share:,} longest events of rank {named} are in it; all are in {folder}"
