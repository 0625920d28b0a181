"""How a run ended: what is said to be saved and lost is."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.launch.local import Failure
from phalanx.run import Run
from phalanx.train.ending import failed, leave_report, left, stopped
from phalanx.verdict import Verdict
from tests.watch.page.folders import write


class Saved:
    def __init__(self, *steps: int) -> None:
        self.saved = list(steps)

    def steps(self) -> list[int]:
        return self.saved


@pytest.mark.parametrize(
    ("saved", "done", "words"),
    [
        ((), 0, "nothing was saved yet"),
        ((), 7, "nothing was saved, 7 steps lost"),
        ((5, 10), 10, "saved up to step 10"),
        ((5, 10), 11, "saved up to step 10, 1 step after it lost"),
        ((10,), 13, "saved up to step 10, 3 steps after it lost"),
    ],
)
def test_what_was_saved_and_lost(tmp_path: Path, saved: tuple[int, ...], done: int, words: str) -> None:
    manager = Saved(*saved)
    verdict = stopped(Run(tmp_path), manager, [], "", done)  # type: ignore[arg-type]
    assert verdict.summary == f"stopped: every rank has ended, {words}"
    assert verdict.exit_code == 130
    assert f"the run ({words});" in left(Run(tmp_path), manager, done).summary  # type: ignore[arg-type]


def test_why_something_was_lost(tmp_path: Path) -> None:
    failures = [Failure(0, 1.0, "the disk is full"), Failure(1, 2.0, "lost its connection", secondary=True)]
    verdict = stopped(Run(tmp_path), Saved(), failures, "by a second Ctrl-C", 4)  # type: ignore[arg-type]
    assert verdict.summary.startswith("stopped by a second Ctrl-C: ")
    assert verdict.evidence == ["rank 0: the disk is full", f"what it did is in {tmp_path}"]


@pytest.mark.parametrize(
    ("saved", "advice"), [((), "begins at step 0: nothing was saved."), ((4,), "goes on after step 4.")]
)
def test_advice_names_no_checkpoint_that_is_not_there(tmp_path: Path, saved: tuple[int, ...], advice: str) -> None:
    failures = [Failure(1, 0.0, "BadNumbers: the loss is nan", "  its line", "all of it", "failures/x.txt")]
    verdict = failed(Run(tmp_path), Saved(*saved), failures)  # type: ignore[arg-type]
    assert verdict.next.endswith(f"phalanx train --resume --run {tmp_path} {advice}")
    assert verdict.evidence == ["  its line", "the whole traceback is in failures/x.txt"]


def test_a_report_is_left_and_the_run_does_not_hang_on_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, verdict = write(tmp_path / "run", 2, 5), Verdict(True, "trained")
    leave_report(run, verdict)
    assert verdict.evidence == [f"report: {run.path / 'report.html'}"]
    assert capfd.readouterr().out == ""
    (run.path / "report.html").unlink()
    (run.path / "report.html").mkdir()  # it cannot be written there
    verdict = Verdict(True, "trained")
    leave_report(run, verdict)
    assert verdict.evidence == []
    assert "note  no report.html was written: " in capfd.readouterr().out
    nothing = write(tmp_path / "nothing", 2, 0)
    leave_report(nothing, verdict)
    assert not (nothing.path / "report.html").exists()
