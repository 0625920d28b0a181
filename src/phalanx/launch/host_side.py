"""What runs on a host that is reached over ssh: sent there as it stands, it needs Python alone.

On standard input come this file, a request as a line of JSON, and then signs of life: while a supervisor is kept, a
line now and then. Where the input ends, or stays silent for too long, nobody waits for the supervisor any more: it is
asked to save and end. Answers are lines that begin with ``MARK``.
"""

from __future__ import annotations

import base64
import ctypes
import grp
import hashlib
import importlib.util
import io
import json
import os
import platform
import pwd
import queue
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

MARK = "phalanx answers "
SILENT_SECONDS = 60.0
"""Without a sign of life from the machine that the run was started on, after which it is taken for lost."""
SEEN_SECONDS = 5.0
"""How long a mark may take to be seen through a network's file system."""
REACHED_SECONDS = 5.0
MARGIN_SECONDS = 30.0
"""Beside the time that ranks have to save in."""
WAITING_CHUNKS = 4096
"""Of output that the link does not take; what is more is dropped, the supervisor does not wait."""
PR_SET_PDEATHSIG = 1
SHARED_MEMORY = "/dev/shm"

Facts = dict[str, Any]


def main() -> None:
    """Do what the line of JSON on standard input asks for."""
    request = json.loads(sys.stdin.buffer.readline())
    answers = {"look": look, "open": open_door, "reach": reach, "unpack": unpack}
    if request["do"] == "keep":
        os._exit(_Kept(request).to_its_end())
    answer(answers[request["do"]](request))
    os._exit(0)


def answer(facts: Facts) -> None:
    print(MARK + json.dumps(facts), flush=True)


# What a host is like.


def look(request: Facts) -> Facts:
    """Versions, room, clock, and what the files of the task hold here."""
    sys.path[:0] = [path for path in request["path"] if path not in sys.path]
    packages = {name: _package(name) for name in ("torch", "phalanx")}
    phalanx = packages["phalanx"]
    return {
        "time": time.time(),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "torch": _version(packages["torch"], "version.py"),
        "phalanx": _version(phalanx, "__init__.py"),
        "source": _hash_of(*sorted(phalanx.rglob("*.py"))) if phalanx else None,
        "memory": _memory(),
        "disk": shutil.disk_usage(_nearest(Path(request["run"]))).free,
        "shared memory": shutil.disk_usage(SHARED_MEMORY).free if os.path.isdir(SHARED_MEMORY) else None,
        "gpus": _gpus() if request["gpus"] else 0,
        "folder": os.path.isdir(request["folder"]),
        "begun": os.path.exists(os.path.join(request["run"], "run.toml")),
        "files": {path: _hash_of(Path(path)) for path in request["files"]},
    }


def _package(name: str) -> Path | None:
    """Its folder; it is not imported, which takes long."""
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(found.origin).parent if found is not None and found.origin else None


def _version(package: Path | None, file: str) -> str | None:
    if package is None:
        return None
    try:
        found = re.search(r"__version__[^=\n]*=\s*['\"]([^'\"]+)", (package / file).read_text())
    except OSError:
        return None
    return found[1] if found else None


def _hash_of(*paths: Path) -> str | None:
    """None: one of them is not there."""
    found = hashlib.sha256()
    try:
        for path in paths:
            found.update(path.read_bytes())
    except OSError:
        return None
    return found.hexdigest()[:16]


def _memory() -> int | None:
    """Bytes that are free, of those that a container may have."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
    except OSError:
        return None
    free = int(found[1]) * 1024 if found else None
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        most, used = int((group / "memory.max").read_text()), int((group / "memory.current").read_text())
        free = max(0, most - used) if free is None else min(free, max(0, most - used))
    return free


def _gpus() -> int:
    try:
        said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except OSError:
        return len(list(Path("/dev").glob("nvidia[0-9]*")))
    return said.count("\nGPU ") + said.startswith("GPU ")


def _nearest(path: Path) -> Path:
    """The folder, or the innermost around it that is there."""
    while not path.is_dir():
        path = path.parent
    return path


# Whether hosts reach each other, and see the same folders.


def open_door(request: Facts) -> Facts:
    """On the first host: listen at the first free of some ports and leave marks, until the input ends."""
    door, busy = None, ""
    for port in request["ports"]:
        try:
            door = _listening(port)
            break
        except OSError as error:
            busy = os.strerror(error.errno or 0)
    refused, marks, made = {}, [], []
    for folder in request["folders"]:
        try:
            made += _made(Path(folder))
            mark = Path(folder) / request["mark"]
            mark.mkdir(0o750)
            marks.append(mark)
            (mark / "0").write_text("was here")
        except OSError as error:
            refused[folder] = error.strerror
    answer({"port": door.getsockname()[1] if door else None, "busy": busy, "refused": refused})
    threading.Thread(target=_welcome, args=(door, request["mark"]), daemon=True).start()
    sys.stdin.buffer.read()
    for mark in marks:
        shutil.rmtree(mark, ignore_errors=True)
    for folder in made:
        with suppress(OSError):  # somebody uses it already
            folder.rmdir()
    return {}


def _listening(port: int) -> socket.socket:
    """At all addresses, for a moment: which of them others know is what is to be found out."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _made(folder: Path) -> list[Path]:
    """The folders that had to be made, the innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(0o750, exist_ok=True)
    return missing


def _welcome(door: socket.socket | None, word: str) -> None:
    while door is not None:
        line, _ = door.accept()
        with line, suppress(OSError):
            line.settimeout(REACHED_SECONDS)
            line.sendall(word.encode())


def reach(request: Facts) -> Facts:
    """On the others: connect to the first host, and look for its marks."""
    return {"port": _reached(request), "folders": {folder: _seen(folder, request) for folder in request["folders"]}}


def _reached(request: Facts) -> str:
    """Why it is not; "": it is, or nothing listens."""
    if not request["port"]:
        return ""
    try:
        with socket.create_connection((request["address"], request["port"]), REACHED_SECONDS) as line:
            said = line.recv(1 << 10).decode(errors="replace")
    except OSError as error:
        return str(error.strerror or error)
    return "" if said == request["mark"] else "something else answers there"


def _seen(folder: str, request: Facts) -> bool:
    """Whether the first host's mark is there, and another can be written beside it."""
    mark, deadline = Path(folder) / request["mark"], time.monotonic() + SEEN_SECONDS
    while True:
        try:
            (mark / "0").read_text()
            (mark / request["name"]).write_text("was here")
            return True
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)


# The task's code, where hosts do not see the folder that it lies in.


def unpack(request: Facts) -> Facts:
    """Into a folder of the run's own, in place of what it held before, where nobody else can put code."""
    cache, note = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "phalanx" / "code", ""
    _made(cache)
    if others := _others_in(cache):
        cache = Path(tempfile.gettempdir()) / f"phalanx-{os.geteuid()}" / "code"
        note = f"{others} belongs to other users, or they can write to it: the code is in {cache}"
        _made(cache)
        if others := _others_in(cache):
            raise SystemExit(
                f"{others} belongs to other users, or they can write to it. Set XDG_CACHE_HOME to your own."
            )
    folder = cache / request["name"]
    new = tempfile.mkdtemp(dir=folder.parent)  # which nobody else may read
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(request["files"]))) as files:
        files.extractall(new)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(new, folder)
    return {"folder": str(folder), "note": note}


def _alone(group: int) -> bool:
    """Whether a group is this user's own, as many systems give everybody one."""
    try:
        me, known = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return group == 0
    return group == 0 or (known.gr_name == me.pw_name and set(known.gr_mem) <= {me.pw_name})


def _others_in(folder: Path) -> str:
    """The first of the folders on the way to one in which another user than root could put code; "": none."""
    innermost = Path(os.path.realpath(folder))
    for each in (innermost, *innermost.parents):
        found = os.lstat(each)
        sticky = each != innermost and found.st_mode & stat.S_ISVTX
        shared = found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _alone(found.st_gid))
        if found.st_uid not in (0, os.geteuid()) or (shared and not sticky):
            return str(each)
    return ""


# The supervisor of this host.


class _Kept:
    """A supervisor, asked to end when the link to the starting machine is."""

    def __init__(self, request: Facts) -> None:
        self.patience: float = request["grace"] + MARGIN_SECONDS
        self.code: str | None = request["code"]
        """The folder that the task's code was copied to, which a run that is done needs no more."""
        self.heard, self.asked, self.now = time.monotonic(), False, False
        os.makedirs(request["folder"], exist_ok=True)
        self.process = subprocess.Popen(
            request["words"], cwd=request["folder"], env={**os.environ, **request["variables"]},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=_end_with_parent,
        )  # fmt: skip
        self.chunks: queue.Queue[bytes] = queue.Queue(WAITING_CHUNKS)
        for work in (self._listen, self._write):
            threading.Thread(target=work, daemon=True).start()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def to_its_end(self) -> int:
        """Its exit code."""
        asked = 0.0
        while (code := self.process.poll()) is None:
            now = time.monotonic()
            if not asked and (self.asked or now - self.heard > SILENT_SECONDS):
                asked = now
                self.process.terminate()
            if self.now or (asked and now - asked > self.patience):
                self._kill()
            time.sleep(0.05)
        self._kill()  # what it left
        if code == 0 and self.code:
            shutil.rmtree(self.code, ignore_errors=True)
        self.reader.join(timeout=5.0)
        deadline = time.monotonic() + 5.0
        while self.chunks.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.02)
        return code if code >= 0 else 128 - code

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _listen(self) -> None:
        for line in sys.stdin.buffer:
            self.heard = time.monotonic()
            self.asked |= line.strip() == b"stop"
            self.now |= line.strip() == b"now"
        self.asked = True

    def _read(self) -> None:
        assert self.process.stdout is not None
        while chunk := os.read(self.process.stdout.fileno(), 1 << 16):
            with suppress(queue.Full):
                self.chunks.put_nowait(chunk)

    def _write(self) -> None:
        while True:
            chunk = self.chunks.get()
            with suppress(OSError):
                while chunk:
                    chunk = chunk[os.write(1, chunk) :]
            self.chunks.task_done()


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    main()
