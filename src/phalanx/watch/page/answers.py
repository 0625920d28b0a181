"""What the page is answered: of the runs that may be seen, each read when it is first asked for, and read on."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

from phalanx.folder_files import note
from phalanx.run import Run
from phalanx.watch.page import assets, links, memory, story, views
from phalanx.watch.page.reading import EventFile, helpers, read_on
from phalanx.watch.page.table import RunTable
from phalanx.words import valid_json

LOOK_SECONDS = 0.5
"""Files are looked at again no sooner, however many watch."""
FIRST_SECONDS = 10.0
"""So long an answer waits for the first rank's events, of a long run that has just been opened."""
TABLES = ("run", "charts", "heat", "spans", "memory")
"""What is answered from a run's events alone."""


class NotThere(LookupError):
    """Nothing has this address."""


@dataclass
class KeptAnswer:
    """What takes a while to find is found anew after ten times as long as that took, and after 3 s at least."""

    found: Any = None
    until: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, find: Callable[[], Any]) -> Any:
        with self.lock:  # others wait for it rather than find it too
            began = time.monotonic()
            if began >= self.until:
                self.put(find(), began)
            return self.found

    def put(self, found: Any, began: float) -> None:
        now = time.monotonic()
        self.found, self.until = found, now + max(3.0, 10 * (now - began))


@dataclass
class Watched:
    """A run that somebody looks at: its events as columns, read on when they are asked for."""

    table: RunTable
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Whoever reads or changes the table holds it."""
    looked: float = -LOOK_SECONDS
    verdict: KeptAnswer = field(default_factory=KeptAnswer)
    links: KeptAnswer = field(default_factory=KeptAnswer)
    opening: threading.Thread | None = None
    """What reads it for the first time, where that takes a while."""
    begun: threading.Event = field(default_factory=threading.Event)
    """While that reads: the first rank's events are there."""

    def open(self, pool: Pool, files: list[EventFile]) -> None:
        """Take in what others read, rank by rank: whoever looks meanwhile sees those that are there."""
        began = time.monotonic()
        try:
            with pool:
                for new in pool.imap(partial(read_on, self.table.run), files):
                    with self.lock:
                        self.table.take([new])
                    self.begun.set()
                self.verdict.put(pool.apply(story.verdict, (self.table.run,)), began)
            pool.join()
        finally:
            self.begun.set()

    @property
    def is_opening(self) -> bool:
        return self.opening is not None and self.opening.is_alive()

    @property
    def is_reading(self) -> bool:
        return self.is_opening and self.table.ranks < len(self.table.files())

    def refreshed(self) -> RunTable:
        if self.is_opening:
            return self.table
        if time.monotonic() - self.looked >= LOOK_SECONDS:
            self.table.refresh()
            self.looked = time.monotonic()
        return self.table

    def concluded(self) -> dict[str, Any]:
        """Until it is found out, how the run stands."""
        if self.is_opening and self.verdict.found is None:
            with self.lock:
                return {"holds": True, "summary": story.standing(self.table.run, self.table), "pending": True}
        found: dict[str, Any] = self.verdict.get(partial(story.verdict, self.table.run))
        return found


class RunPages:
    """``runs`` lists those that may be seen, by name; nothing else of the disk can be named."""

    def __init__(self, runs: Callable[[], Mapping[str, Run]]) -> None:
        self.runs = runs
        self._watched: dict[str, Watched] = {}
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Begin to read the run that is shown first, if it is long; to be called before any thread is started."""
        for name in list(self.runs())[-1:]:
            watched = self._run(name)
            files = watched.table.files()
            pool = helpers(watched.table.run, files)
            if pool is not None:
                watched.opening = threading.Thread(target=watched.open, args=(pool, files), daemon=True)
                watched.opening.start()

    def answer(self, path: str, query: Mapping[str, str]) -> tuple[bytes, str]:
        """Bytes, and of which type they are."""
        if path in ("/", "/index.html"):
            return assets.page().encode(), "text/html; charset=utf-8"
        if path.startswith("/assets/") and (name := path.removeprefix("/assets/")) in assets.TYPES:
            return assets.read(name), assets.TYPES[name]
        if path.startswith("/api/"):
            return valid_json(self._json(path.removeprefix("/api/"), query)).encode(), "application/json"
        raise NotThere(path)

    def _json(self, what: str, query: Mapping[str, str]) -> Any:
        if what == "runs":
            return [brief for run in self.runs().values() if (brief := _brief(run)) is not None]
        if what not in (*TABLES, "verdict", "links"):
            raise NotThere(what)
        watched = self._run(query.get("run", ""))
        if what == "verdict":
            return watched.concluded()
        if what == "links":
            return watched.links.get(partial(links.read, watched.table.run))
        if watched.is_opening:
            watched.begun.wait(FIRST_SECONDS)
        beside = [run.path for run in self.runs().values()]
        with watched.lock:
            return _of_events(watched, what, query, beside)

    def _run(self, name: str) -> Watched:
        run = self.runs().get(name)
        if run is None:
            raise NotThere(f"no run {name!r} is watched here")
        with self._lock:
            return self._watched.setdefault(name, Watched(RunTable(run)))


def _brief(run: Run) -> dict[str, Any] | None:
    """A run in the list of all; None, and a note, where nothing can be read of it."""
    try:
        return story.brief(run)
    except (OSError, ValueError) as error:
        note(f"{run.path} is not listed: {error}")
        return None


def _of_events(watched: Watched, what: str, query: Mapping[str, str], beside: Sequence[Path]) -> dict[str, Any]:
    table = watched.refreshed()
    numbers = {name: int(text) for name, text in query.items() if re.fullmatch(r"\d{1,12}", text)}
    window = views.Window.of(table, numbers)
    if what == "run":
        return story.facts(table.run, table, beside) | {"reading": watched.is_reading}
    if what == "charts":
        return views.charts(table, window, numbers.get("since"), numbers.get("width", 0))
    if what == "heat":
        return views.heat(table, window, query.get("phase", views.OWN_TIME))
    if what == "memory":
        return memory.memory(table, numbers.get("rank", 0), window)
    return views.spans(table, window)
