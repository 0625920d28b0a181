"""What a job's first pod prints, brought into a file on this machine by ``kubectl logs``."""

from __future__ import annotations

import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from phalanx.folder_files import appending, make_folder, overwriting

LOOK_SECONDS = 1.0
"""Between two looks for a pod whose container has started."""
PATIENCE_SECONDS = 10.0
"""For the last lines of a job that has ended."""


class PodLog:
    """Beside whoever reads the file: a pod that is replaced, or whose container starts again, is read on."""

    def __init__(
        self,
        line: Callable[..., list[str]],
        first: Callable[[], Mapping[str, Any] | None],
        folder: Path,
        path: Path,
        keep_on: bool,
    ) -> None:
        """``line``: makes a command line of kubectl's; ``first``: finds the pod; ``folder``: the run's."""
        self.line, self.first, self.folder, self.path, self.keep_on = line, first, folder, path, keep_on
        self._over = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._read: dict[str, int] = {}
        """By container, how many bytes have been read; one that ended counts as whole."""
        self._said: set[str] = set()
        self._begun = False
        self._thread = threading.Thread(target=self._watch, name=f"logs of {path.stem}", daemon=True)

    def __enter__(self) -> Self:
        make_folder(self.folder, self.path.parent)
        if not self.keep_on:
            self._once()
            return self
        with appending(self.folder, self.path):
            pass
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if not self.keep_on:
            return
        if kind is None:
            self._thread.join(PATIENCE_SECONDS)
        process = self._process
        if process is not None:
            with suppress(OSError):
                process.kill()
        self._thread.join(PATIENCE_SECONDS)

    def _once(self) -> None:
        pod = self.first()
        if pod is None:
            return  # it may be gone: what was read of it before stays
        done = subprocess.run(
            self.line("logs", "--", pod["metadata"]["name"]), stdin=subprocess.DEVNULL, capture_output=True
        )
        if done.returncode == 0:
            with overwriting(self.folder, self.path) as file:
                file.write(done.stdout)

    def _watch(self) -> None:
        last = False
        while not last:
            last = self._over.wait(LOOK_SECONDS)
            pod = self.first()
            container = None if pod is None else _started(pod)
            if pod is not None and container is not None and self._read.get(container, 0) >= 0:
                self._copy(pod["metadata"]["name"], container)

    def _copy(self, pod: str, container: str) -> None:
        """All that a container prints from where it was left, until it ends or the connection does."""
        skip = self._read.get(container, 0)
        command = self.line("logs", "--follow", "--", pod)
        if not self._begun:
            with overwriting(self.folder, self.path):  # now that there is something to read again
                self._begun = True
        with appending(self.folder, self.path) as file, tempfile.TemporaryFile() as errors:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
            with self._process as process:
                assert process.stdout is not None
                while part := process.stdout.read1(1 << 16):  # type: ignore[attr-defined]
                    new = part[min(skip, len(part)) :]
                    skip -= len(part) - len(new)
                    file.write(new)
                    file.flush()
                    self._read[container] = self._read.get(container, 0) + len(new)
            errors.seek(0)
            said = " ".join(errors.read().decode(errors="replace").split())
            if process.returncode > 0 and said not in self._said:
                self._said.add(said)
                file.write(f"   note  kubectl logs {pod}: {said}\n".encode())
        now = self.first()
        if now is not None and _started(now) == container and _running(now):
            return  # the connection broke: it is read on
        self._read[container] = -1


def _started(pod: Mapping[str, Any]) -> str | None:
    """One start of a pod's container; None: it has not started."""
    for each in pod.get("status", {}).get("containerStatuses", []):
        if {"running", "terminated"} & set(each.get("state", {})):
            return f"{pod['metadata'].get('uid')} {each.get('restartCount', 0)}"
    return None


def _running(pod: Mapping[str, Any]) -> bool:
    return any("running" in each.get("state", {}) for each in pod.get("status", {}).get("containerStatuses", []))
