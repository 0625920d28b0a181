"""report.html: the page of a run in one file, with all that it shows in it, to keep and to send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phalanx.errors import WrongUse
from phalanx.files import write_whole
from phalanx.run import Run
from phalanx.watch.page import assets, links, memory, story, views
from phalanx.watch.page.table import RunTable

COLUMNS = 800
"""So fine a report's charts are: whoever reads it cannot ask for more."""
MAP_COLUMNS = 400
MOST_RANKS = 16
"""Whose memory a report shows."""


def write_report(run: Run) -> Path:
    """Write it into the run's folder, whole."""
    table = RunTable(run)
    if not table.refresh():
        raise WrongUse(f"{run.path} has no events to report. Give the folder of a run that has begun.")
    path = run.path / "report.html"
    write_whole(path, assets.whole(told(run, table)))
    return path


def told(run: Run, table: RunTable) -> dict[str, Any]:
    """Everything that the page would ask for."""
    asked = {"columns": COLUMNS}
    window, map_window = views.Window.of(table, asked), views.Window.of(table, {"columns": MAP_COLUMNS})
    return {
        "run": story.facts(run, table),
        "verdict": story.verdict(run),
        "charts": views.charts(table, window),
        "heat": {phase: views.heat(table, map_window, phase) for phase in views.phases(table)},
        "spans": views.spans(table, window),
        "memory": {rank: _memory(table, rank) for rank in memory.ranks(table)[:MOST_RANKS]},
        "links": links.read(run),
    }


def _memory(table: RunTable, rank: int) -> dict[str, Any]:
    return memory.memory(table, rank, views.Window.of(table, {"columns": MAP_COLUMNS}))
