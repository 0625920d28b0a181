"""What hosts have to do with slow ranks: processors that were busy all the time, GPUs that were throttled."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.run import Run

LAST_BYTES = 1 << 16
LAST_LINES, LEAST_LINES = 60, 2
"""So many of a host's newest lines are looked at, and so few say nothing."""
GONE_SECONDS = 60.0
"""A host that has written nothing for so long, while others have, is not part of the run any more."""
SATURATED = 95.0
"""Of a host's processors, in percent."""
OFTEN = 0.5
"""A host's processors were saturated if they were in so many of its lines."""


def host_notes(run: Run, host: str = "") -> list[str]:
    """A line for each finding; of one host, or of all."""
    found: list[str] = []
    paths = sorted((run.path / "events").glob("host-*.jsonl"))
    hosts = [lines for lines in (list(_newest(path))[-LAST_LINES:] for path in paths) if len(lines) >= LEAST_LINES]
    newest = max((_when(lines) for lines in hosts), default=0.0)
    for lines in hosts:
        name = str(lines[-1].get("host", ""))
        if host in ("", name) and newest - _when(lines) < GONE_SECONDS:
            found += _of_host(name, lines)
    return found


def _when(lines: list[dict[str, Any]]) -> float:
    return float(lines[-1].get("time", 0.0))


def _of_host(name: str, lines: list[dict[str, Any]]) -> Iterator[str]:
    busy = sorted(line["cpu"] for line in lines if "cpu" in line)
    if busy and sum(each >= SATURATED for each in busy) >= OFTEN * len(busy):
        cores, usual = lines[-1].get("cores", "?"), busy[len(busy) // 2]
        yield f"the processors of {name} were saturated meanwhile: its {cores} cores were {usual:.0f}% busy"
    reasons: dict[str, Counter[str]] = {}
    for line in lines:
        for key, why in line.items():
            if known := re.fullmatch(r"gpu(\d+)_throttled", key):
                reasons.setdefault(known[1], Counter())[str(why)] += 1
    for gpu, counts in sorted(reasons.items(), key=lambda each: int(each[0])):
        why = ", ".join(reason for reason, _ in counts.most_common())
        hottest = max(
            (line[f"gpu{gpu}_temperature"] for line in lines if f"gpu{gpu}_temperature" in line), default=None
        )
        heat = "" if hottest is None else f", at up to {hottest:.0f} degrees"
        yield f"GPU {gpu} of {name} was throttled ({why}) in {sum(counts.values())} of {len(lines)} looks{heat}"


def _newest(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
            text = file.read()
    except OSError:
        return
    for line in text.split(b"\n"):
        with suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and event.get("kind") == "host":
                yield event
