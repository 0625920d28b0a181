"""report.html: one file with everything in it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from phalanx.errors import WrongUse
from phalanx.run import Run
from phalanx.watch.page.report import write_report
from tests.watch.page.folders import write


def test_a_report_has_what_the_page_would_ask_for(tmp_path: Path) -> None:
    run = write(tmp_path / "run", 3, 2000, slow=(2, 1234))
    path = write_report(run)
    assert path == run.path / "report.html"
    text = path.read_text()
    told = json.loads(re.findall(r'id="told">(.*?)</script>', text, re.DOTALL)[0])
    assert told["run"]["settings"]["steps"] == "2000"
    assert told["run"]["again"] == f"phalanx train --config {run.settings_path}"
    assert len(told["charts"]["steps"]) <= 800
    assert told["heat"].keys() == {"own", "total", "data", "forward", "backward", "reduce", "update"}
    assert max(told["heat"]["total"]["ranks"], key=lambda own: own["most"])["step"] == 1235
    assert len(told["spans"]["rows"]) == 3
    assert len(text) < 600_000
    assert path.stat().st_mode & 0o777 == 0o640 & ~_umask()


def _umask() -> int:
    import os

    now = os.umask(0)
    os.umask(now)
    return now


def test_a_folder_without_events_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="has no events to report"):
        write_report(Run(tmp_path))
