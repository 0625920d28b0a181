"""How a run ended: what is said to be saved and lost is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from phalanx import flight
from phalanx.launch.local import Failure
from phalanx.run import Run
from phalanx.train.ending import failed, leave_report, left, stopped
from phalanx.verdict import Verdict
from phalanx.watch.chart import HEIGHT
from tests.test_cli import phalanx
from tests.watch.page.folders import write
from tests.watch.records import Scribe
from tests.watch.test_evidence import account


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


def test_who_waited_is_not_named_for_who_was_waited_for(tmp_path: Path) -> None:
    """The verdict of `phalanx why` is what the terminal says."""
    for rank in range(2):
        scribe = Scribe(rank)
        scribe.collective("dp a")
        if rank == 0:
            scribe.collective("dp a", waits=None)
        flight.save(Run(tmp_path), 1, rank, scribe.memory)
    account(tmp_path, 1, 0, {"rank": 0, "secondary": True, "timed_out": True, "file": ""})
    first = Failure(0, 1.0, "waited for another rank until its time was up", secondary=True, timed_out=True)
    verdict = failed(Run(tmp_path), Saved(), [first])  # type: ignore[arg-type]
    assert re.match(r"stuck: rank 1 on .* never came to all-reduce 2 on dp, where rank 0 waits for it", verdict.summary)
    assert verdict.evidence[0] == "rank 0 failed first: waited for another rank until its time was up"
    assert verdict.next.startswith(f"phalanx why {tmp_path} says more.")


def test_a_run_of_many_steps_ends_with_a_chart_and_a_quiet_one_with_little_else(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("from tests.tasks import Digits\nclass Mine(Digits):\n    pass\n")
    done = phalanx("train", "task.py", "--steps", "60", "--quiet", "--run", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second, *lines = done.stdout.splitlines()
    assert first == "trained Mine for 60 steps on dp=1"
    assert re.fullmatch(r"loss \d\.\d{4} to \d\.\d{4}", second)
    assert all("│" in line for line in lines[:HEIGHT])
    assert lines[HEIGHT].split() == ["└", "step", "1", "step", "60"]
    rest = [line for line in lines[HEIGHT + 1 :] if "FLOP/s a rank" not in line]  # they are counted meanwhile
    assert [line.split()[0] for line in rest] == ["held", "certificate:", "weights:", "report:"]
    assert not done.stderr


def test_a_short_run_ends_with_a_line(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("from tests.tasks import Digits\nclass Mine(Digits):\n    pass\n")
    done = phalanx("train", "task.py", "--steps", "6", "--log-every", "3", "--run", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.split()[2] for line in done.stdout.splitlines() if " step " in line][-3:] == ["3/6", "6/6", "after"]
    assert re.search(r"^loss \d\.\d{4} [▁-█]{6} \d\.\d{4}$", done.stdout, re.MULTILINE)
    refused = phalanx("train", "task.py", "--quiet", "--log-every", "3", cwd=tmp_path)
    assert refused.returncode == 2
    assert "--quiet prints no lines, and --log-every 3 asks for some. Give one of them." in refused.stderr


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
