"""A CSV file: a line a step, whole numbers of it at any time; another for evaluations."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path
from typing import IO

from phalanx.files import write_whole
from phalanx.folder_files import open_file
from phalanx.watch.loggers.base import LoggedRun, Logger, Numbers


class StepTable:
    """A CSV file whose lines are steps, ascending. A column that is new is empty in the lines before."""

    def __init__(self, path: Path, after: int) -> None:
        """Lines of steps ``after`` that one are forgotten, and one that was cut short."""
        self.path = path
        self._file: IO[str] | None = None
        self._last = 0
        rows = [row for row in _read(path) if int(row["step"]) <= after]
        self.columns = list(dict.fromkeys(name for row in rows for name in row)) or ["step"]
        self._rewrite(rows)

    def add(self, step: int, numbers: Numbers) -> None:
        """One more line, or another in place of the last if it is that step's."""
        row = {"step": str(step), **{name: f"{value:.10g}" for name, value in numbers.items()}}
        if step == self._last or not row.keys() <= set(self.columns):
            self.columns += [name for name in row if name not in self.columns]
            self._rewrite([*(known for known in _read(self.path) if int(known["step"]) < step), row])
        elif self._file is not None:
            self._file.write(_line([row.get(name, "") for name in self.columns]))
            self._file.flush()
        self._last = step

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        lines = [self.columns, *([row.get(name, "") for name in self.columns] for row in rows)]
        self.close()
        write_whole(self.path, "".join(map(_line, lines)))
        self._last = int(rows[-1]["step"]) if rows else 0
        descriptor = open_file(self.path.parent, self.path, os.O_WRONLY | os.O_APPEND)
        self._file = os.fdopen(descriptor, "a", encoding="utf-8")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _read(path: Path) -> list[dict[str, str]]:
    """The whole lines of such a file, by column; none if it is not there."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    columns, *rows = list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1]))) or [[]]
    whole = [dict(zip(columns, row, strict=True)) for row in rows if len(row) == len(columns)]
    return [row for row in whole if row.get("step", "").isdecimal()]


def _line(cells: list[str]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(cells)
    return out.getvalue()


class CSV(Logger):
    """``logs/metrics.csv`` and ``logs/evaluations.csv``."""

    title, file = "CSV", "metrics.csv"
    forgets = True

    def begin(self, run: LoggedRun) -> None:
        self._steps = StepTable(run.folder / self.file, run.step)
        self._beside, self._after = run.folder / "evaluations.csv", run.step
        self._evaluations = StepTable(self._beside, run.step) if self._beside.exists() else None

    def write(self, step: int, numbers: Numbers) -> None:
        self._steps.add(step, numbers)

    def write_measures(self, step: int, measures: Numbers) -> None:
        self._evaluations = self._evaluations or StepTable(self._beside, self._after)
        self._evaluations.add(step, measures)

    def end(self, finished: bool) -> None:
        self._steps.close()
        if self._evaluations is not None:
            self._evaluations.close()
