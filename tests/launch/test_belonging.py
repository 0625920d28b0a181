"""A signal is sent to a process that runs a run by what the system says, and to no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phalanx import CannotHere, Run
from phalanx.launch import belonging

HOLDS = """
import os, signal, sys
from pathlib import Path
from phalanx.run import held
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
with held(Path(sys.argv[1])):
    print("held", flush=True)
    signal.pause()
"""
WRITES = """
import signal, sys
file = open(sys.argv[1], sys.argv[2])
print("open", flush=True)
signal.pause()
"""


@contextmanager
def running(text: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", text, *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "run").mkdir()
    return Run(tmp_path / "run")


def test_who_holds_a_lock_is_asked_to_end(run: Run) -> None:
    lock = run.path / "lock"
    with running(HOLDS, str(run.path)) as process:
        assert belonging.holds(process.pid, lock)
        assert belonging.ask(process.pid, signal.SIGTERM, lambda pid: belonging.holds(pid, lock))
        assert process.wait(20) == 7
    assert not belonging.holds(process.pid, lock)
    assert not belonging.ask(process.pid, signal.SIGTERM, lambda pid: True)


def test_who_has_the_lock_open_alone_does_not_hold_it(run: Run) -> None:
    (run.path / "lock").write_text("process 1 on here")
    with running(WRITES, str(run.path / "lock"), "r+") as process:
        assert not belonging.holds(process.pid, run.path / "lock")
        assert not belonging.ask(process.pid, signal.SIGKILL, lambda pid: belonging.holds(pid, run.path / "lock"))
        assert process.poll() is None


def test_a_lock_by_another_name_is_another_s(run: Run, tmp_path: Path) -> None:
    """A hard link to the lock of a run that somebody trains, in a folder that says to be theirs."""
    (tmp_path / "forged").mkdir()
    with running(HOLDS, str(run.path)) as process:
        os.link(run.path / "lock", tmp_path / "forged" / "lock")
        assert belonging.holds(process.pid, run.path / "lock")
        assert not belonging.holds(process.pid, tmp_path / "forged" / "lock")


def test_who_writes_in_a_folder(run: Run, tmp_path: Path) -> None:
    (run.path / "events").mkdir()
    (run.path / "events" / "x").write_text("")
    with running(WRITES, str(run.path / "events" / "x"), "a") as process:
        assert belonging.writes_in(process.pid, run.path)
        assert not belonging.writes_in(process.pid, run.path / "events" / "y")
        assert not belonging.writes_in(process.pid, tmp_path / "other")
    with running(WRITES, str(run.path / "events" / "x"), "r") as process:
        assert not belonging.writes_in(process.pid, run.path)


def test_what_is_no_process_is_not_asked(run: Run) -> None:
    for pid in (0, 1 << 22, 1 << 40, -1):
        assert not belonging.ask(pid, signal.SIGTERM, lambda pid: True)


def test_where_the_system_does_not_say_it_the_command_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    with pytest.raises(CannotHere, match=r"then: kill -TERM 12$"):
        belonging.ask(12, signal.SIGTERM, lambda pid: True)
