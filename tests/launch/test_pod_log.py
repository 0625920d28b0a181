"""A pod's log is read to its end, over broken connections and replaced pods."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from phalanx.launch import pod_log
from phalanx.launch.pod_log import PodLog


def pod(uid: str, running: bool) -> dict[str, Any]:
    state = {"running": {}} if running else {"terminated": {"exitCode": 0}}
    return {"metadata": {"name": uid, "uid": uid}, "status": {"containerStatuses": [{"state": state}]}}


class Pods:
    """A pod's log is a file, and the connection to it breaks after so many bytes."""

    def __init__(self, folder: Path, breaks: int = 1 << 20) -> None:
        self.folder, self.breaks = folder, breaks
        self.now: dict[str, Any] | None = None
        self.lines = 0

    def line(self, *words: str) -> list[str]:
        self.lines += 1
        text = f"import sys; sys.stdout.write(open(sys.argv[1]).read()[:{self.breaks * self.lines}])"
        return [sys.executable, "-c", text, str(self.folder / words[-1])]


def until(path: Path, text: str) -> None:
    deadline = time.monotonic() + 30
    while path.read_text() != text:
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.05)


def test_what_was_read_before_is_not_read_again(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(pod_log, "LOOK_SECONDS", 0.05)
    pods, out = Pods(tmp_path, breaks=4), tmp_path / "out"
    (tmp_path / "one").write_text("first 1234\n")
    (tmp_path / "two").write_text("second\n")
    with PodLog(pods.line, lambda: pods.now, tmp_path, out, keep_on=True):
        pods.now = pod("one", running=True)
        until(out, "first 1234\n")
        pods.now = pod("two", running=False)
        until(out, "first 1234\nsecond\n")


def test_what_there_is_is_read_at_once(tmp_path: Path) -> None:
    pods = Pods(tmp_path)
    (tmp_path / "one").write_text("all of it\n")
    pods.now = pod("one", running=True)
    with PodLog(pods.line, lambda: pods.now, tmp_path, tmp_path / "out", keep_on=False):
        assert (tmp_path / "out").read_text() == "all of it\n"
    pods.now = None
    with PodLog(pods.line, lambda: pods.now, tmp_path, tmp_path / "out", keep_on=False):
        assert (tmp_path / "out").read_text() == "all of it\n"


def test_what_kubectl_says_instead_is_told_once(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(pod_log, "LOOK_SECONDS", 0.05)

    def line(*words: str) -> list[str]:
        return [sys.executable, "-c", "import sys; sys.exit('logs are not for you')"]

    with PodLog(line, lambda: pod("one", running=True), tmp_path, tmp_path / "out", keep_on=True):
        until(tmp_path / "out", "   note  kubectl logs one: logs are not for you\n")
        time.sleep(0.5)
    assert (tmp_path / "out").read_text().count("not for you") == 1
