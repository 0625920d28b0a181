"""A job that runs elsewhere, followed: what it prints, as it prints it, until it ends or somebody looks away."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from phalanx.folder_files import BadFile, reading
from phalanx.launch.place import ENDED, QUEUED, UNKNOWN, Place, Status
from phalanx.run import Run
from phalanx.verdict import Verdict
from phalanx.words import printable

LOOK_SECONDS = 0.2
ASK_SECONDS, LONGEST_SECONDS = 1.0, 15.0
"""Between two questions to the place: at first, and at most, a little longer each time."""
MOST_AT_ONCE = 1 << 22
"""Bytes of a file that are read at once."""
BAR = ("━", "─")
"""What a line of progress begins with."""


class Tail:
    """What is added to a file, line by line; a line of progress renews itself on a terminal."""

    def __init__(self, folder: Path, path: Path) -> None:
        """``folder``: the run's, in which the file is."""
        self.folder, self.path, self.at, self.rest = folder, path, 0, b""
        self.live = sys.stdout.isatty()
        self._open = False
        """Whether the cursor stands behind a line of progress."""

    def lines(self) -> Iterator[str]:
        """Those that were added, and end."""
        try:
            with reading(self.folder, self.path) as file:
                file.seek(self.at)
                while added := file.read(MOST_AT_ONCE):
                    self.at += len(added)
                    *whole, self.rest = (self.rest + added).split(b"\n")
                    yield from (_shown(line) for line in whole)
                    if len(self.rest) > MOST_AT_ONCE:
                        raise BadFile(self.path, "has no line break for many megabytes, and is no log")
        except FileNotFoundError:
            return

    def show(self) -> bool:
        """Whether there was anything."""
        shown = False
        for line in self.lines():
            shown = True
            again = self.live and line.startswith(BAR)
            print(("\r\x1b[K" if self._open else "") + line, end="" if again else "\n", flush=True)
            self._open = again
        return shown

    def close(self) -> None:
        self.show()
        if self.rest or self._open:
            print(_shown(self.rest), flush=True)


def _shown(line: bytes) -> str:
    """A line as a terminal would show it, but for what controls the terminal; what is written over is left out."""
    return printable(line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace"))


def follow(place: Place, run: Run, job: str) -> Verdict:
    """To the end of a job, with its exit code. Ctrl-C ends the following, and nothing else."""
    tail, pause, said = Tail(run.path, place.output(run, job)), ASK_SECONDS, ""
    asked, status = 0.0, Status(UNKNOWN)
    try:
        with place.fetching(run, job, keep_on=True):
            while status.state != ENDED:
                if time.monotonic() - asked > pause:
                    status, asked = place.status(run, job), time.monotonic()
                    pause = min(LONGEST_SECONDS, pause * 1.1)
                    if status.state in (QUEUED, UNKNOWN) and status.detail != said:
                        said = status.detail
                        print(printable(f"  queue  {said}", one_line=True), flush=True)
                if tail.show():
                    pause = ASK_SECONDS if status.state != ENDED else pause
                time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        tail.close()
        return looked_away(place, run, job)
    time.sleep(LOOK_SECONDS)
    tail.close()
    if status.code == 0 or (status.code is None and run.certified_steps() is not None):
        return Verdict(True, f"{place.word} job {job} is done")
    return Verdict(
        False, f"{place.word} job {job} ended: {status.detail}", [f"what it printed is in {tail.path}"],
        next=f"Mend what it says there, then {place.again(run)}", code=status.code or 1,
    )  # fmt: skip


def looked_away(place: Place, run: Run, job: str) -> Verdict:
    """On a job that goes on by itself."""
    return Verdict(
        False, f"no longer followed: {place.word} job {job} goes on", [f"what it does is in {run.path}"],
        next=f"Look again with phalanx logs {run.in_shell}, end it with phalanx cancel {run.in_shell}", code=130,
    )  # fmt: skip
