"""Supervisors on hosts, each behind a connection of its own: begun, heard, asked to stop, and begun again when lost.

Hosts that are lost are gone on without; that is theirs to do (``rendezvous``). Here the lost are called again, and what
all of them say becomes one log: that of the host with rank 0 as it is, the others' lines with their names.
"""

from __future__ import annotations

import os
import queue
import re
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from phalanx.folder_files import open_file
from phalanx.launch.following import BAR, Tail
from phalanx.launch.host_side import MARGIN_SECONDS, Facts
from phalanx.launch.ssh import LOST, SshHost, shown
from phalanx.launch.stopping import ENDING, Stop, handled

LOOK_SECONDS, BEAT_SECONDS, RETRY_SECONDS = 0.1, 5.0, 5.0
HOPELESS_SECONDS = 600.0
"""How long hosts are called again that are lost all at once."""
MEETING_SECONDS = 30.0
"""How long the host that the others meet at may be lost before they meet elsewhere."""
LAST_SECONDS = 20.0
"""For the others, when one host says that the run is done."""
REJOINS = 5
"""So many times a host that was lost may fail to take part again."""
FIRST = re.compile(r"\s+host  1 of \d+, generation ")


class Link:
    """One host's supervisor, as far as it can be heard."""

    def __init__(self, remote: SshHost, request: Facts, heard: queue.Queue[tuple[Link, str | None]]) -> None:
        self.remote, self.request, self.heard = remote, request, heard
        self.process: subprocess.Popen[bytes] | None = None
        self.code: int | None = None
        """With which it ended for good."""
        self.lost: float | None = None
        """Since when."""
        self.said = ""
        self.again, self.called, self.refused = 0.0, False, 0
        """When it is called again if it is lost, whether it was, and how often it could not take part then."""
        self._speaking = threading.Lock()

    def start(self) -> None:
        self.process = self.remote.start(self.request)
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    @property
    def live(self) -> bool:
        return self.process is not None

    def say(self, word: str = "") -> None:
        process = self.process
        if process is not None and process.stdin is not None:
            with self._speaking, suppress(OSError, ValueError):  # it has ended
                process.stdin.write(f"{word}\n".encode())
                process.stdin.flush()

    def ended(self) -> int:
        """The exit code, and in ``said`` why, of a process whose output is over."""
        assert self.process is not None
        assert self.process.stderr is not None
        with self.process:
            self.said = self.process.stderr.read().decode(errors="replace").strip()
            code = self.process.wait()
        self.process = None
        return code

    def hang_up(self) -> None:
        if self.process is not None:
            self.process.kill()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in iter(process.stdout.readline, b""):
            self.heard.put((self, line.decode(errors="replace").rstrip("\r\n")))
        self.heard.put((self, None))


class Links:
    """The supervisors of a run, from their start to their end."""

    def __init__(self, requests: Mapping[SshHost, Facts], folder: Path, stop: Stop) -> None:
        """``folder``: for what they print. The first host is the one that others meet at."""
        self.heard: queue.Queue[tuple[Link, str | None]] = queue.Queue()
        self.links = [Link(remote, request, self.heard) for remote, request in requests.items()]
        self.folder, self.stop = folder, stop
        self.moving = False
        """The host that others meet at is lost: they end, to meet elsewhere."""
        self._told = self._cut = False
        self._first: Link | None = None if len(self.links) > 1 else self.links[0]
        self._files: dict[str, IO[str]] = {}
        self._deadline: float | None = None
        self._over = threading.Event()

    def follow(self) -> None:
        """To the end of all of them; each link then has its code."""
        tail = Tail(self.folder.parent, self.folder / LOG)
        tail.at = tail.path.stat().st_size if tail.path.exists() else 0
        try:
            with handled(ENDING, lambda number, frame: self.stop.heard(number)):
                for link in self.links:
                    link.start()
                threading.Thread(target=self._beat, daemon=True).start()
                while any(link.live for link in self.links) or self._calls():
                    self._listen()
                    tail.show()
                    self._tend()
        finally:
            self._over.set()
            for link in self.links:
                link.hang_up()
            for file in self._files.values():
                file.close()
            tail.close()

    @property
    def done(self) -> bool:
        return any(link.code == 0 for link in self.links)

    def lost(self) -> list[str]:
        return [link.remote.name for link in self.links if link.lost is not None]

    def note(self, line: str) -> None:
        self._file(LOG).write(f"{line}\n")
        self._file(LOG).flush()

    def _listen(self) -> None:
        with suppress(queue.Empty):
            link, line = self.heard.get(timeout=LOOK_SECONDS)
            while True:
                self._take(link, line)
                link, line = self.heard.get_nowait()

    def _take(self, link: Link, line: str | None) -> None:
        if line is None:
            self._ended(link)
            return
        name = link.remote.name
        if link.lost is not None:
            link.lost = None
            self.note(f"   host  {name} is reached again")
        if FIRST.match(line):
            self._first = link
        self._file(f"{name}.out").write(f"{line}\n")
        self._file(f"{name}.out").flush()
        self.note(line if link is self._first or line.startswith(BAR) else f"[{name}] {line}")

    def _ended(self, link: Link) -> None:
        """One that was lost is called again; one that could not take part again, some times."""
        code, now = link.ended(), time.monotonic()
        goes_on = not (self.stop.asked or self.done or self.moving)
        if code == LOST and goes_on:
            if link.lost is None:
                others = "; the others go on" if any(other.live for other in self.links) else ""
                self.note(f"  again  host {link.remote.name} is lost: {shown(link.said)}{others}")
            link.lost, link.again = link.lost or now, now + RETRY_SECONDS
        elif code in (2, 3) and goes_on and link.called and link.refused < REJOINS:
            link.refused += 1
            link.lost, link.again = now, now + RETRY_SECONDS
        else:
            link.code, link.lost = code, None
            if link.said:
                self.note(f"[{link.remote.name}] {link.remote.why(code, link.said)}")

    def _beat(self) -> None:
        """Signs of life, also while nobody reads what is printed here."""
        while not self._over.wait(BEAT_SECONDS):
            for link in self.links:
                link.say()

    def _calls(self) -> bool:
        """Whether hosts that are lost are to be called again."""
        lost = [link.lost for link in self.links if link.lost is not None]
        if not lost or self.stop.asked or self.done or self.moving:
            return False
        return any(link.live for link in self.links) or (
            len(lost) == len(self.links) and time.monotonic() - max(lost) < HOPELESS_SECONDS
        )

    def _tend(self) -> None:
        now = time.monotonic()
        for link in self.links:
            if link.lost is not None and not link.live and link.again < now and self._calls():
                link.called = True
                link.start()
        self._end(now)

    def _end(self, now: float) -> None:
        """Ask for the end where there is a reason, and wait for it no longer than it may take."""
        if not (self.moving or self.stop.asked or self.done) and self._nowhere_to_meet(now):
            self.moving = True
            name = self.links[0].remote.name
            self.note(f"  again  host {name}, where hosts meet, stays lost: they end, and meet at another")
        if self.stop.asked and not self._told:
            self.note(self.stop.told())
        if (self.stop.asked or self.moving) and not self._told:
            self._told = True
            for link in self.links:
                link.say("stop")
        if self.stop.cut_short and not self._cut:
            self._cut = True
            for link in self.links:
                link.say("now")
        if self._deadline is None and (self.done or self._told):
            patience = LAST_SECONDS if self.done else self.stop.grace + 2 * MARGIN_SECONDS
            self._deadline = now + patience
        if self._deadline is not None and now > self._deadline:
            for link in self.links:
                link.hang_up()

    def _nowhere_to_meet(self, now: float) -> bool:
        since = self.links[0].lost
        return (
            since is not None
            and now - since > MEETING_SECONDS
            and any(link.live and link.lost is None for link in self.links)
        )

    def _file(self, name: str) -> IO[str]:
        if name not in self._files:
            path, flags = self.folder / name.replace("/", "_"), os.O_WRONLY | os.O_APPEND | os.O_CREAT
            self._files[name] = os.fdopen(open_file(self.folder.parent, path, flags), "a", encoding="utf-8")
        return self._files[name]


LOG = "run.log"
"""What was printed where the run was started."""
