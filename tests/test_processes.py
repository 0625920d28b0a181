"""What only Linux has, switched off: a job trains, survives and leaves nothing, as it would have to elsewhere."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx import Run, WrongUse, cli
from phalanx.checkpoint.slot import free_memory
from phalanx.processes import aside, die_with_parent
from tests.test_cli import GOOD, run_forked
from tests.test_recovery import certificate


def without_linux() -> None:
    """In a process of its own: no memfd, prctl, /proc, cgroups, affinity or fadvise; interfaces without names."""
    sys.platform = "darwin"
    for name in ("memfd_create", "sched_getaffinity", "process_cpu_count", "posix_fadvise"):
        if hasattr(os, name):
            delattr(os, name)
    whole = Path.read_text

    def read_text(self: Path, *args: Any, **options: Any) -> str:
        if self.parts[:2] in (("/", "proc"), ("/", "sys")):
            raise FileNotFoundError(2, "No such file or directory", str(self))
        return whole(self, *args, **options)

    Path.read_text = read_text  # type: ignore[method-assign]


def _train(*words: str, linux: bool) -> None:
    if not linux:
        without_linux()
        assert free_memory() is None
    sys.argv = ["phalanx", "train", *words]
    cli.main()


def test_a_job_survives_without_what_only_linux_has(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GOOD)
    words = ("mine.py", "--on", "local:2", "--steps", "12", "--memory-steps", "2", "--kill", "1@6")
    for linux in (False, True):
        done = run_forked(_train, *words, "--run", str(linux), cwd=tmp_path, linux=linux)
        assert done.returncode == 0, done.stderr
        assert "starting again" in done.stderr
    found, expected = Run(tmp_path / "False"), Run(tmp_path / "True")
    assert certificate(found)["state"] == certificate(expected)["state"]
    assert [event["source"] for event in found.events(0, "start")] == [None, "memory"]


def _child(said: int) -> None:
    die_with_parent()
    os.write(said, b"up\n")
    time.sleep(60)


def _parent(said: int) -> None:
    without_linux()
    child = multiprocessing.get_context("fork").Process(target=_child, args=(said,))
    child.start()
    child.join()


def test_a_child_ends_with_its_parent_without_prctl() -> None:
    reading, writing = os.pipe()
    process = multiprocessing.get_context("fork").Process(target=_parent, args=(writing,))
    process.start()
    os.close(writing)
    with os.fdopen(reading) as said:
        assert said.readline() == "up\n"
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        began = time.monotonic()
        assert said.read() == "", "the pipe ends with the child"
        assert time.monotonic() - began < 30
    process.join()
    process.close()


def test_what_is_looked_at_aside_leaves_nothing_here() -> None:
    seen: list[int] = []

    def look() -> int:
        seen.append(os.getpid())
        return len(seen)

    def fail() -> None:
        raise WrongUse("a sample is broken. Mend it.")

    assert aside(look) == 1
    assert seen == []
    with pytest.raises(WrongUse, match="a sample is broken"):
        aside(fail)
    with pytest.raises(RuntimeError, match="ended with -9"):
        aside(lambda: os.kill(os.getpid(), signal.SIGKILL))
