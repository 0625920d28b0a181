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

from phalanx.event_fields import is_event, is_number
from phalanx.folder_files import is_file, left_out, names, note, reading
from phalanx.run import Run
from phalanx.words import many

LAST_BYTES = 1 << 16
LAST_LINES, LEAST_LINES = 60, 2
"""So many of a host's newest lines are looked at, and so few say nothing."""
GONE_SECONDS = 60.0
"""A host that has written nothing for so long, while others have, is not part of the run any more."""
SATURATED = 95.0
"""Of a host's processors, in percent."""
OFTEN = 0.5
"""A host's processors were saturated if they were in so many of its lines."""
MOST_HOSTS = 4096
"""Whose files are looked at."""


def host_notes(run: Run, host: str = "") -> list[str]:
    """A line for each finding; of one host, or of all."""
    found: list[str] = []
    folder = run.path / "events"
    every = [name for name in names(run.path, folder, is_file) if re.fullmatch(r"host-\d{5,9}\.jsonl", name)]
    if len(every) > MOST_HOSTS:
        note(f"{folder} has files of {many(len(every), 'host')}: of these the first {MOST_HOSTS:,} are looked at")
    read = (list(_newest(run.path, folder / name))[-LAST_LINES:] for name in every[:MOST_HOSTS])
    hosts = [lines for lines in read if len(lines) >= LEAST_LINES]
    newest = max((_when(lines) for lines in hosts), default=0.0)
    for lines in hosts:
        name = str(lines[-1].get("host", ""))
        if host in ("", name) and newest - _when(lines) < GONE_SECONDS:
            found += _of_host(name, lines)
    return found


def _when(lines: list[dict[str, Any]]) -> float:
    return float(lines[-1].get("time", 0.0))


def _of_host(name: str, lines: list[dict[str, Any]]) -> Iterator[str]:
    busy = sorted(line["cpu"] for line in lines if is_number(line.get("cpu")))
    if busy and sum(each >= SATURATED for each in busy) >= OFTEN * len(busy):
        cores, usual = lines[-1].get("cores", "?"), busy[len(busy) // 2]
        yield f"the processors of {name} were saturated meanwhile: its {cores} cores were {usual:.0f}% busy"
    reasons: dict[str, Counter[str]] = {}
    for line in lines:
        for key, why in line.items():
            if known := re.fullmatch(r"gpu(\d{1,4})_throttled", key):
                reasons.setdefault(known[1], Counter())[str(why)] += 1
    for gpu, counts in sorted(reasons.items(), key=lambda each: int(each[0])):
        why = ", ".join(reason for reason, _ in counts.most_common())
        temperatures = [line.get(f"gpu{gpu}_temperature") for line in lines]
        hottest = max((each for each in temperatures if each is not None and is_number(each)), default=None)
        heat = "" if hottest is None else f", at up to {hottest:.0f} degrees"
        yield f"GPU {gpu} of {name} was throttled ({why}) in {sum(counts.values())} of {len(lines)} looks{heat}"


def _newest(folder: Path, path: Path) -> Iterator[dict[str, Any]]:
    text = b""
    with left_out(), reading(folder, path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
        text = file.read(LAST_BYTES)
    for line in text.split(b"\n"):
        with suppress(ValueError, RecursionError):
            event = json.loads(line)
            if isinstance(event, dict) and event.get("kind") == "host" and is_event(event):
                yield event
