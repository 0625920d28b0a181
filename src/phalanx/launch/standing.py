"""How runs stand: done, running, queued or ended, by their folders and by the places they were submitted to."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import CannotHere, WrongUse
from phalanx.folder_files import names
from phalanx.launch import belonging
from phalanx.launch.following import Tail, follow
from phalanx.launch.place import ENDED, QUEUED, RUNNING, UNKNOWN, noted, said_by
from phalanx.run import Run, event_of, holder
from phalanx.verdict import Verdict
from phalanx.words import columns, many, printable, valid_json
from phalanx.words import listed as in_words

DONE, STOPPED, UNREADABLE = "done", "stopped", "unreadable"
LONGEST_CELL = 200
"""Letters of what a run's folder says, in a line about it."""
LOOK_SECONDS = 0.5
SHOWN = 5
"""So many runs are named to who names none."""


@dataclass(frozen=True)
class Standing:
    """One run, as far as can be told from here."""

    run: str
    task: str
    layout: str
    state: str
    """done, running, queued, stopped, ended, unknown or unreadable."""
    steps: int
    """Done."""
    planned: int
    loss: float | None
    where: str
    """Who runs it, or the place's own words."""
    time: float
    """Of its newest event, or of its settings."""

    @classmethod
    def of(cls, run: Run) -> Standing:
        task, layout, planned = run.summary()
        last = run.last_step() or {}
        state, where = _state(run)
        loss = last.get("loss")
        return cls(
            str(run.path), task, layout, state, last.get("step", -1) + 1, planned,
            None if loss is None else float(loss), where, float(last.get("time", run.path.stat().st_mtime)),
        )  # fmt: skip

    @classmethod
    def unreadable(cls, run: Run, why: str) -> Standing:
        """Of a run whose folder is not as it should be."""
        return cls(str(run.path), "?", "?", UNREADABLE, 0, 0, None, why, 0.0)

    def to_json(self) -> str:
        """One JSON object."""
        return valid_json(asdict(self))

    def __str__(self) -> str:
        loss = "" if self.loss is None else f", loss {self.loss:.4f}"
        ago = f", {_ago(time.time() - self.time)}" if self.steps and self.state != QUEUED else ""
        lines = [
            f"{self.run}: {self.state}{f', {self.where}' if self.where else ''}",
            f"{_cell(self.task)} on {_cell(self.layout)}: step {self.steps} of {self.planned}{loss}{ago}",
        ]
        return "\n".join(printable(line, one_line=True) for line in lines)


def runs_in(folder: Path) -> list[Run]:
    """The runs of a folder, the newest last."""
    found = []
    for name in names(folder, folder) if folder.is_dir() else ():
        path = folder / name
        with suppress(OSError):  # taken away meanwhile, or another user's alone
            if any(os.path.lexists(path / file) for file in ("run.toml", "place.json")):
                found.append((path.stat().st_mtime, path))
    return [Run(path) for _, path in sorted(found)]


def run_at(path: Path | None) -> Run:
    """The run in a folder, or the newest under ``runs/``."""
    if path is None:
        found = runs_in(Path("runs"))
        if not found:
            raise WrongUse("there is no run under runs/ here. Name one: phalanx status DIR")
        return found[-1]
    run = Run(path)
    if not (run.settings_path.exists() or (path / "place.json").exists()):
        folders = dict.fromkeys([path, path.parent, Path("runs")])
        there = [str(each.path) for folder in folders for each in runs_in(folder)[::-1]]
        advice = (
            f"Give one that is there: {in_words(there, SHOWN)}" if there else "There is none under runs/ here either"
        )
        raise WrongUse(f"{path} is no run's folder. {advice}.")
    return run


def listed(folder: Path) -> list[Standing]:
    """How all runs of a folder stand; one that cannot be read is listed with the reason."""
    return [_listed(run) for run in runs_in(folder)]


def _listed(run: Run) -> Standing:
    try:
        return Standing.of(run)
    except (WrongUse, CannotHere) as error:
        return Standing.unreadable(run, str(error))
    except OSError as error:
        return Standing.unreadable(run, f"{error.filename or run.path}: {error.strerror or error}")


def table(standings: list[Standing]) -> str:
    """For people."""
    rows: list[tuple[str, ...]] = [("run", "state", "step", "loss", "layout", "where")]
    for each in standings:
        loss = "" if each.loss is None else f"{each.loss:.4f}"
        where = each.where if each.state == UNREADABLE else _cell(each.where)
        rows.append((each.run, each.state, f"{each.steps}/{each.planned}", loss, _cell(each.layout), where))
    rows = [tuple(printable(cell, one_line=True) for cell in row) for row in rows]
    return "\n".join(columns(rows, right=(2, 3)))


def _cell(text: str) -> str:
    return text if len(text) <= LONGEST_CELL else f"{text[:LONGEST_CELL]}..."


def alive(run: Run) -> str:
    """Who runs a run, or will, as far as can be told; nothing: nobody."""
    state, where = _state(run)
    return "" if state in (DONE, STOPPED, ENDED) else where or state


def cancel(run: Run) -> str:
    """Ask a run to save and end, wherever it is; in words what was done."""
    state, where = _state(run)
    if state in (DONE, STOPPED, ENDED):
        return f"{run.path} is {state} already"
    submitted = noted(run)
    if submitted is not None and submitted[0].status(run, submitted[1]).state != ENDED:
        place, job = submitted
        place.cancel(run, job)
        return f"asked {place.word} job {job} to end; ranks save what they have done"
    found = re.match(r"process (\d{1,9}) on (\S+)", holder(run.path))
    if found is None or found[2] != socket.gethostname():
        host = found[2] if found else "another host"
        raise CannotHere(f"{run.path} is run by {where or host}, not here. Cancel it on {host}.")
    pid, lock = int(found[1]), run.path / "lock"
    if not belonging.ask(pid, signal.SIGTERM, lambda process: belonging.holds(process, lock)):
        raise CannotHere(belonging.refused(pid, lock))
    return f"asked process {pid} to end; ranks save what they have done"


def show_logs(run: Run, keep_on: bool) -> Verdict:
    """What a run printed; ``keep_on``: until it ends."""
    submitted = noted(run)
    if submitted is not None:
        place, job = submitted
        if keep_on:
            return follow(place, run, job)
        with place.fetching(run, job, keep_on=False):
            Tail(run.path, place.output(run, job)).close()
    else:
        for line in _told(run, keep_on):
            print(line, flush=True)
    state, where = _state(run)
    return Verdict(True, f"{run.path}: {state}{f', {where}' if where else ''}")


def _told(run: Run, keep_on: bool) -> Iterator[str]:
    """A run's events in words, where nobody kept what it printed."""
    tail = Tail(run.path, run.events_path(0))
    while True:
        over = _state(run)[0] != RUNNING
        for line in tail.lines():
            if (event := event_of(line.encode())) is not None:
                yield printable(_in_words(event), one_line=True)
        if over or not keep_on:
            return
        time.sleep(LOOK_SECONDS)


def _in_words(event: dict[str, Any]) -> str:
    """One line."""
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.get("time", 0)))
    kind = event["kind"]
    step = f" {event['step'] + 1}" if kind == "step" else f" {event['step']}" if "step" in event else ""
    keep = ("loss", "held_out", "reason", "world", "layout", "generation", "why", "failed", "steps")
    said = "  ".join(f"{name} {_short(event[name])}" for name in keep if event.get(name) not in (None, ""))
    return f"{clock}  {kind}{step}  {said}".rstrip()


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name} {_short(inner)}" for name, inner in value.items())
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _state(run: Run) -> tuple[str, str]:
    if run.certified_steps() is not None:
        return DONE, ""
    who, submitted = holder(run.path), None
    try:
        submitted = noted(run)
        if submitted is not None:
            place, job = submitted
            status = place.status(run, job)
            if status.state != ENDED or not who:
                detail = f": {status.detail}" if status.detail else ""
                said = f" (says place.json of {whose})" if (whose := said_by(run)) else ""
                return status.state, f"{place.word} job {job}{detail}{said}"
    except (CannotHere, WrongUse, OSError) as error:  # what knows of it is not on this machine
        return (RUNNING, who) if who else (UNKNOWN, str(error))
    return (RUNNING, who) if who else (STOPPED, "")


def _ago(seconds: float) -> str:
    for size, one in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            return f"{many(int(seconds // size), one)} ago"
    return "just now"
