"""A job followed: every line once, as it comes, until it ends or somebody looks away."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import pytest

from phalanx import Run, Verdict
from phalanx.launch import following
from phalanx.launch.following import Tail, follow
from phalanx.launch.place import ENDED, QUEUED, RUNNING, Command, Place, Status


@dataclass(frozen=True, kw_only=True)
class Written(Place):
    """A place whose jobs are what a test writes into files."""

    word: ClassVar[str] = "written"
    text: str = "written"

    @classmethod
    def parse(cls, options: Mapping[str, str], rest: str) -> Self:
        return cls()

    def preview(self, command: Command) -> str:
        return ""

    def train(self, command: Command, check: Callable[[], object]) -> Verdict:
        return follow(self, Run(command.run), "1")

    def status(self, run: Run, job: str) -> Status:
        state, _, code = (run.path / "state").read_text().partition(" ")
        return Status(state, state.upper(), int(code) if code else None)

    def cancel(self, run: Run, job: str) -> None: ...

    def output(self, run: Run, job: str) -> Path:
        return run.path / "out"


def test_every_line_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tail = Tail(tmp_path, tmp_path / "out")
    assert not tail.show()  # it is not there yet
    with (tmp_path / "out").open("wb") as file:
        for part in (b"one\ntw", "o\n━━ step 1\nd".encode(), b"r"):
            file.write(part)
            file.flush()
            tail.show()
    tail.close()
    assert capsys.readouterr().out == "one\ntwo\n━━ step 1\ndr\n"


def test_progress_renews_itself_on_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").write_text("━ step 1\n━━ step 2\ndone\n")
    tail = Tail(tmp_path, tmp_path / "out")
    tail.live = True
    tail.close()
    assert capsys.readouterr().out == "━ step 1\r\x1b[K━━ step 2\r\x1b[Kdone\n"


def _later(*actions: tuple[float, Path, str]) -> threading.Thread:
    def act() -> None:
        for seconds, path, text in actions:
            time.sleep(seconds)
            with path.open("a" if path.name == "out" else "w") as file:
                file.write(text)

    thread = threading.Thread(target=act)
    thread.start()
    return thread


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(following, "ASK_SECONDS", 0.05)
    monkeypatch.setattr(following, "LOOK_SECONDS", 0.02)
    (tmp_path / "state").write_text(QUEUED)
    return Run(tmp_path)


@pytest.mark.parametrize("code", [0, 3])
def test_a_job_is_followed_to_its_end(run: Run, capsys: pytest.CaptureFixture[str], code: int) -> None:
    out, state = run.path / "out", run.path / "state"
    thread = _later((0.2, state, RUNNING), (0, out, "step 1\n"), (0.2, out, "step 2\n"), (0, state, f"{ENDED} {code}"))
    verdict = follow(Written(), run, "1")
    thread.join()
    assert (verdict.exit_code, verdict.holds) == (code, code == 0)
    assert capsys.readouterr().out == "  queue  QUEUED\nstep 1\nstep 2\n"


def test_who_looks_away_is_told_how_to_look_again(run: Run) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which tests in parallel do not have
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        verdict = follow(Written(), run, "1")
    finally:
        signal.signal(signal.SIGINT, before)
    timer.join()
    assert verdict.exit_code == 130
    assert f"phalanx logs {run.path}" in verdict.next
