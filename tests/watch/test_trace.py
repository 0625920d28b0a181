"""Traces of ranks put on one clock, under names of their own, and no larger than can be opened."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from phalanx.watch.trace import MARK, MergedTrace, RankTrace, notes, part_path, parts

SECOND = 1_000_000_000


def written(
    run: Path, rank: int, events: list[dict[str, Any]], *, clock: float = 0.0, ahead: int = 0, **facts: Any
) -> Path:
    """A rank's trace; ``clock``: what the trace calls the moment of its mark, in microseconds; ``ahead``: of others."""
    marks = [[1000 * SECOND + ahead, 1000 * SECOND + ahead + 2000], [2000 * SECOND, 2001 * SECOND]]
    timed = [{"ph": "X", "name": MARK, "pid": 7, "tid": 7, "ts": clock + 0.5, "dur": 1.0}]
    timed += [{"ph": "X", "name": MARK, "pid": 7, "tid": 7, "ts": clock + 900.0, "dur": 1.0}]
    known = {
        "rank": rank,
        "world": 2,
        "host": f"host {'ab'[rank % 2]}",
        "device": "cpu",
        "layout": "dp=2",
        "generation": 1,
    }
    known |= {"chosen": [0, 1], "ahead_ns": ahead, "marks": marks, "steps": [1, 2], "sent": [], "calls": []}
    path = part_path(run, "steps-1-2", rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        json.dump({"phalanx": known | facts, "traceEvents": [*timed, *events]}, file)
    return path


def range_of(name: str, begin: float, length: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 7, "tid": 7, "ts": begin, "dur": length, **more}


def merged(run: Path, share: int = 100) -> tuple[list[dict[str, Any]], MergedTrace]:
    folder = run / "profile" / "steps-1-2"
    made = MergedTrace(folder.with_name("steps-1-2.json.gz"), share)
    for part in parts(folder):
        made.add(part)
    made.close()
    with gzip.open(made.path, "rt") as file:
        return json.load(file)["traceEvents"], made


def test_one_moment_is_one_moment(tmp_path: Path) -> None:
    """Each rank saw something 5 microseconds after the same moment, by clocks that begin, and go, differently."""
    written(tmp_path, 0, [range_of("a", 6.0, 1.0)], clock=0.0)
    written(tmp_path, 1, [range_of("a", 506.0, 1.0)], clock=500.0, ahead=3 * SECOND)
    events, _ = merged(tmp_path)
    first, second = (event for event in events if event["name"] == "a")
    assert abs(first["ts"] - second["ts"]) < 0.5
    assert first["pid"] != second["pid"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {first["pid"]: "rank 0 on host a", second["pid"]: "rank 1 on host b"}
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert order[first["pid"]] < order[second["pid"]]


def test_arrows_stay_at_their_rank_and_gpus_have_names(tmp_path: Path) -> None:
    arrow = {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 5, "pid": 7, "tid": 7, "ts": 3.0}
    kernel = range_of("gemm", 4.0, 1.0, cat="kernel", pid=1)
    noise = [{"ph": "X", "cat": "Trace", "name": "x", "pid": "Spans", "tid": 1, "ts": 0.0, "dur": 9.0}]
    for rank in (0, 1):
        written(tmp_path, rank, [range_of("a", 2.0, 9.0), arrow, kernel, *noise])
    events, _ = merged(tmp_path)
    assert [event["id"] for event in events if event["ph"] == "s"] == ["0.5", "1.5"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == [f"rank {r} on host {h}{g}" for r, h in ((0, "a"), (1, "b")) for g in ("", ": GPU 1")]


def test_a_trace_that_is_too_large_keeps_what_takes_longest(tmp_path: Path) -> None:
    written(tmp_path, 0, [range_of(f"{n}", 10.0 * n, float(n)) for n in range(1, 50)])
    events, made = merged(tmp_path, share=5)
    assert {event["name"] for event in events if event["ph"] == "X"} == {"45", "46", "47", "48", "49"}
    assert made.thinned == [0]
    said = list(notes([{"rank": 0, "generation": 1}], [0], made, tmp_path))
    assert said == [f"only the 5 longest events of rank 0 are in it; all are in {tmp_path}"]


def test_what_is_not_whole_is_left_out_and_said(tmp_path: Path) -> None:
    written(tmp_path, 0, [range_of("a", 1.0, 1.0)])
    path = written(tmp_path, 1, [range_of("a", 1.0, 1.0)])
    path.write_bytes(path.read_bytes()[:-20])
    part_path(tmp_path, "steps-1-2", 2).write_bytes(b"")
    found = [part.facts for part in parts(path.parent)]
    assert [facts["rank"] for facts in found] == [0]
    _, made = merged(tmp_path)
    (said,) = notes(found, [0, 1], made, tmp_path)
    assert said == "1 rank left no whole trace, having been ended before that perhaps: 1"
    later = [*found, {"rank": 1, "generation": 2}]
    assert "ranks were started again meanwhile" in next(notes(later, [0, 1], made, tmp_path))


def test_the_tightest_mark_counts(tmp_path: Path) -> None:
    part = RankTrace.read(written(tmp_path, 0, [], clock=250.0))
    assert part.base_us == 1e9 + 1.0 - 251.0
