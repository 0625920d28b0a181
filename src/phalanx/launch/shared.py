"""Do all hosts see the folder that checkpoints lie in? Asked whenever they meet, not found out when it is too late.

The first host leaves a mark there, under a name that nobody has looked for before: what a file system remembers not to
have found cannot hide it. The others read it and write beside it.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import BinaryIO, Protocol

from phalanx.errors import CannotHere
from phalanx.launch.rendezvous import Rendezvous
from phalanx.launch.rounds import Round

MARK = ".met-"
PATIENCE_SECONDS = 10.0
"""How long a mark may take to be seen through a network's file system."""


class SharedStore(Protocol):
    """What is asked of a store of checkpoints, or of a folder."""

    url: str

    def names(self) -> list[str]: ...
    def make(self, folder: str) -> None: ...
    def write(self, name: str) -> AbstractContextManager[BinaryIO]: ...
    def read(self, name: str) -> bytes: ...
    def remove(self, folder: str) -> None: ...


class Shared:
    """What all hosts of a run must see: its checkpoints. That they see its folder is better, but not needed."""

    def __init__(self, rendezvous: Rendezvous, folder: SharedStore, checkpoints: SharedStore) -> None:
        self.rendezvous, self.folder, self.checkpoints = rendezvous, folder, checkpoints
        self.private = ""
        """The host whose folder has what rank 0 writes, if it is not this one's folder too."""
        self._marked: list[tuple[SharedStore, str]] = []

    def check(self, met: Round, asked: Callable[[], bool]) -> None:
        """Refuse a host that does not see the checkpoints' folder."""
        if met.node == 0:
            if self.private:
                raise CannotHere(
                    f"host {self.private} was lost, and what it wrote to {self.folder.url} with it: host "
                    f"{self.rendezvous.host} does not see that folder. Checkpoints are in {self.checkpoints.url}: "
                    f"start the run again on host {self.private}, or give --run a folder that all hosts see."
                )
            return self._mark()
        mark = self._told(asked)
        if mark is None:
            return None
        first = met.hosts[0]
        if not _seen(self.checkpoints, mark, met.node):
            why = (
                f"host {self.rendezvous.host} does not see what host {first} writes to {self.checkpoints.url}, or "
                "cannot write there: no checkpoint could be made. Give --run a folder that all hosts share, or "
                "--checkpoints a folder or store that all of them reach."
            )
            self.rendezvous.put("unshared", why)
            raise CannotHere(why)
        if self.private != first and not _seen(self.folder, mark, met.node):
            self.private = first
            print(
                f"   note  {self.folder.url} is not shared: the run's events, weights and certificate are in that "
                f"folder of host {first}, and without that host the run cannot go on",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        return None

    def unshared(self) -> str:
        """Why hosts that meet for the first time have nothing to train with: one of them does not see the folder."""
        return self.rendezvous.get("unshared") or ""

    def close(self) -> None:
        """Take the marks away."""
        for store, mark in self._marked:
            with suppress(OSError):
                store.remove(mark)
        self._marked.clear()

    def _mark(self) -> None:
        self.close()
        mark = f"{MARK}{secrets.token_hex(8)}"
        for store in (self.checkpoints, self.folder):
            try:
                for left in [name for name in store.names() if name.startswith(MARK)]:  # by a host that was lost
                    store.remove(left)
                store.make(mark)
                _write(store, mark, 0)
            except OSError as error:
                raise CannotHere(
                    f"host {self.rendezvous.host} cannot write to {store.url}: {error.strerror or error}. "
                    "Give a folder that all hosts can write to."
                ) from None
            self._marked.append((store, mark))
        self.rendezvous.put("mark", mark)

    def _told(self, asked: Callable[[], bool]) -> str | None:
        """The mark's name; None if the round is over before it is known."""
        while (mark := self.rendezvous.get("mark")) is None:
            change = self.rendezvous.changed()
            if asked() or (change is not None and change.urgent):
                return None
            time.sleep(0.02)
        return mark


def _seen(store: SharedStore, mark: str, node: int) -> bool:
    """Whether the mark can be read, with some patience, and written beside."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            store.read(f"{mark}/0")
            _write(store, mark, node)
            return True
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)


def _write(store: SharedStore, mark: str, node: int) -> None:
    with store.write(f"{mark}/{node}") as file:
        file.write(b"was here")
