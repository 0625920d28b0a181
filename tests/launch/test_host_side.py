"""What runs on a host, run here as it is sent there: it looks, and keeps a supervisor for as long as it is heard."""

from __future__ import annotations

import base64
import io
import json
import os
import platform
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx import __version__, user_code
from phalanx.launch import host_side
from phalanx.launch.ssh import BEGIN, read

SAVES = """\
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(130)))
print("begun", flush=True)
time.sleep(60)
"""
DEAF = """\
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("begun", flush=True)
time.sleep(60)
"""


def begun(request: dict[str, Any], silent: float = 60.0) -> subprocess.Popen[bytes]:
    """As over ssh, from a host that is taken for lost after so long."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", BEGIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    source = Path(host_side.__file__).read_text().replace("SILENT_SECONDS = 60.0", f"SILENT_SECONDS = {silent}")
    process.stdin.write(source.encode().hex().encode() + b"\n" + json.dumps(request).encode() + b"\n")
    process.stdin.flush()
    return process


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Any]:
    made = []

    def keep(program: str, grace: float = 5.0, silent: float = 60.0) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", program]
        request = {"do": "keep", "words": words, "folder": str(tmp_path), "code": None, "variables": {"A": "b"}}
        made.append(begun({**request, "grace": grace}, silent))
        return made[-1]

    yield keep
    for process in made:
        process.kill()
        process.communicate()


def until_begun(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"


def test_a_host_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("a")
    files = [str(tmp_path / "a.py"), str(tmp_path / "b.py")]
    request = {"path": sys.path, "run": str(tmp_path / "x" / "y"), "gpus": 0, "folder": str(tmp_path), "files": files}
    out, err = begun({"do": "look", **request}).communicate(timeout=60)
    found = read(out.decode())
    assert found is not None, err
    assert (found["python"], found["torch"]) == (platform.python_version(), torch.__version__)
    assert (found["phalanx"], found["source"]) == (__version__, user_code.own_hash())
    assert found["files"] == {files[0]: user_code.file_hash(tmp_path / "a.py"), files[1]: None}
    assert abs(found["time"] - time.time()) < 60
    assert found["memory"] > 1 << 20
    assert found["disk"] > 1 << 20


def test_a_supervisor_ends_with_its_exit_code(keep: Any) -> None:
    process = keep("import os, sys; print(os.environ['A']); sys.exit(7)")
    assert process.wait(timeout=30) == 7
    assert process.stdout.read() == b"b\n"
    assert keep("import os; os.kill(os.getpid(), 9)").wait(timeout=30) == 137


@pytest.mark.parametrize("way", ["a word", "the input ends", "silence"])
def test_a_supervisor_is_asked_to_save_and_end(keep: Any, way: str) -> None:
    process = keep(SAVES, silent=1.0 if way == "silence" else 60.0)
    until_begun(process)
    if way == "a word":
        process.stdin.write(b"stop\n")
        process.stdin.flush()
    elif way == "the input ends":
        process.stdin.close()
        process.stdin = None
    assert process.stdout.readline() == b"saved\n"
    assert process.wait(timeout=30) == 130


def test_signs_of_life_keep_it_going(keep: Any) -> None:
    process = keep(SAVES, silent=1.5)
    until_begun(process)
    for _ in range(5):
        time.sleep(0.5)
        process.stdin.write(b"\n")
        process.stdin.flush()
    assert process.poll() is None


def test_one_that_does_not_listen_is_killed(keep: Any) -> None:
    process = keep(DEAF)
    until_begun(process)
    process.stdin.write(b"stop\nnow\n")
    process.stdin.flush()
    assert process.wait(timeout=30) == 137


def test_a_supervisor_does_not_wait_for_a_link_that_takes_nothing(keep: Any) -> None:
    process = keep("import sys; sys.stdout.write('x' * (1 << 25)); sys.stdout.flush(); sys.exit(5)")  # nobody reads
    assert process.wait(timeout=30) == 5


def test_it_does_not_outlive_its_keeper(keep: Any) -> None:
    process = keep(f"import os; print(os.getpid(), flush=True)\n{SAVES}")
    pid = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def packed(*names: str) -> str:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    return base64.b64encode(buffer.getvalue()).decode()


def test_code_is_not_unpacked_where_others_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    found = host_side.unpack({"name": "one", "files": packed("a.py")})
    assert Path(found["folder"]) == tmp_path / "tmp" / f"phalanx-{os.geteuid()}" / "code" / "one"
    assert f"{tmp_path / 'shared'} belongs to other users, or they can write to it" in found["note"]
    (tmp_path / "tmp").chmod(0o777)
    with pytest.raises(SystemExit, match="Set XDG_CACHE_HOME to your own"):
        host_side.unpack({"name": "one", "files": packed("a.py")})


def test_code_is_unpacked_in_place_of_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for names in (("a/b.py", "a/c.py"), ("a/b.py",)):
        found = host_side.unpack({"name": "one", "files": packed(*names)})
    folder = Path(found["folder"])
    assert folder == tmp_path / "phalanx" / "code" / "one"
    assert [str(path.relative_to(folder)) for path in folder.rglob("*.py")] == ["a/b.py"]
    assert folder.stat().st_mode & 0o077 == 0
    assert [path.name for path in folder.parent.iterdir()] == ["one"]
