"""The meeting's reception: one thread, on one host, that knows who is there, who is lost, and when a round begins.

All decisions are made here, one after another, and by this process's own clock: ages of what was heard, never another
host's time. A broken connection is evidence of death: the kernel closes it when a process ends, and a healthy process,
however starved of processors, keeps it. Silence is weaker: it counts after ``silence`` seconds in which this thread
listened.

The reception keeps nothing that a member of the round does not know too (``Book``). So it may end at any time: another
host opens a new one, and what members bring is put together again.
"""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from phalanx.launch.lines import Line, not_for_children, ready

MAGIC = "phalanx meeting"
VERSION = 1
TICK = 0.1
BEATS = 10
"""Signs of life, in both directions, in the time after which none at all is a loss."""
MOVING = 0.5
"""Seconds for hosts to find a reception that has just opened, perhaps after another was lost."""
STRAGGLING = 30.0
"""Seconds for a host of the last round, still there, to stop its ranks and come to the next one."""


@dataclass
class Book:
    """What every member knows of the present round."""

    generation: int = 0
    hosts: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    address: str = ""
    port: int = 0
    over: str = ""
    """Why, once the round is over."""
    urgent: bool = False
    wanted: str = ""
    """A host that waits for a place, and could have one."""
    lost: list[str] = field(default_factory=list)
    done: dict[str, str] = field(default_factory=dict)
    """Outcomes, of the hosts whose ranks have all returned."""
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def running(self) -> bool:
        return bool(self.hosts) and not self.over

    @property
    def finished(self) -> str | None:
        """The outcome, once every host of the round has one."""
        if not self.hosts or any(host not in self.done for host in self.hosts):
            return None
        return ", ".join(sorted(set(self.done.values())))

    def end(self, why: str, urgent: bool) -> None:
        """The first reason stays; that it became urgent may come later."""
        self.over = self.over or why
        self.urgent = self.urgent or urgent

    def lose(self, host: str, why: str) -> None:
        if host in self.hosts and host not in self.lost and host not in self.done:
            self.lost.append(host)
            self.end(f"host {host} was lost: {why}", urgent=True)

    @classmethod
    def read(cls, values: dict[str, Any]) -> Book:
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})


@dataclass
class Guest:
    """One connection, and who is behind it once it has said so."""

    line: Line
    host: str = ""
    token: str = ""
    """Tells a host that comes back from another one of the same name."""
    generation: int = 0
    """The last round it was in."""
    joined: float | None = None
    """Since when it has been waiting for a round."""
    wish: dict[str, Any] = field(default_factory=dict)


class Reception:
    """Serves the hosts of one run at a socket that already listens, until it is closed."""

    def __init__(self, door: socket.socket, host: str, terms: dict[str, Any], last_call: float) -> None:
        """``terms``: what all hosts must agree on."""
        self.door, self.host, self.terms, self.last_call = not_for_children(door), host, terms, last_call
        self.silence: float = terms["silence"]
        self.book = Book()
        self.guests: list[Guest] = []
        self.since = self.opened = time.monotonic()
        """Since when the book's round has been over, or since when it is known here."""
        self._news = False
        self._closing = False
        self._beat = 0.0
        door.setblocking(False)
        self._thread = threading.Thread(target=self._serve, name="meeting's reception", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        self._thread.join()

    def _serve(self) -> None:
        last = time.monotonic()
        while not self._closing:
            found = ready([self.door, *(guest.line for guest in self.guests)], TICK)
            now = time.monotonic()
            if self.door.fileno() in found:
                self._accept()
            for guest in list(self.guests):
                if guest.line.fileno() in found:
                    guest.line.flush()
                    for message in guest.line.receive():
                        try:
                            self._hear(guest, message)
                        except (KeyError, TypeError, AttributeError):  # a stranger's words; ours are of one version
                            guest.line.broken = True
                if now - last > self.silence / BEATS + TICK:  # this thread did not listen: nobody was silent meanwhile
                    guest.line.heard = min(now, guest.line.heard + now - last)
            last = now
            self._look_after(now)
            self._form(now)
            self._tell(now)
        for guest in self.guests:
            guest.line.send(farewell=True)
        deadline = time.monotonic() + 1.0
        for guest in self.guests:
            guest.line.close(deadline - time.monotonic())
        self.door.close()

    def _accept(self) -> None:
        try:
            line = Line(self.door.accept()[0])
        except OSError:  # it left while it stood in the queue
            return
        line.send(greeting=MAGIC, version=VERSION, host=self.host)
        self.guests.append(Guest(line))

    def _hear(self, guest: Guest, message: dict[str, Any]) -> None:
        book = self.book
        if "hello" in message:
            self._welcome(guest, message["hello"])
        elif not guest.host:
            guest.line.broken = True  # a stranger
        elif "join" in message:
            self._join(guest, message["join"])
        elif "leave" in message:
            if guest.generation == book.generation and guest.host in book.hosts and guest.host not in book.done:
                book.lost.append(guest.host)
                self._end(f"host {guest.host} left: {message['leave']}", urgent=True)
            guest.line.broken = True
        elif message.get("generation") == book.generation == guest.generation and guest.host not in book.lost:
            self._news = True
            if "failed" in message:
                self._end(f"host {guest.host} failed: {message['failed']}", urgent=True)
            elif "done" in message:
                book.done[guest.host] = message["done"]
            elif "fact" in message:
                book.facts |= message["fact"]

    def _welcome(self, guest: Guest, hello: dict[str, Any]) -> None:
        host, book = hello["host"], Book.read(hello["book"])
        if hello["version"] != VERSION:
            return self._refuse(
                guest, "use",
                f"host {host} speaks version {hello['version']} of the meeting's protocol and host {self.host} version "
                f"{VERSION}. Install the same Phalanx on all hosts.",
            )  # fmt: skip
        for key, ours in self.terms.items():
            if (theirs := hello["terms"].get(key)) != ours:
                return self._refuse(
                    guest, "use",
                    f"host {host} came for {key} {theirs!r}, but the meeting, opened by host {self.host}, is for {key} "
                    f"{ours!r}. Start all hosts of a run with the same settings, and every run with a port of its own.",
                )  # fmt: skip
        for other in self.guests:
            if other.host == host and not other.line.broken:
                if other.token != hello["token"]:
                    return self._refuse(guest, "taken", f"two hosts call themselves {host!r}. Name them apart.")
                other.host, other.line.broken = "", True  # the same one, through a new connection
        guest.host, guest.token, guest.generation = host, hello["token"], book.generation
        self._put_together(book)
        if guest.generation < self.book.generation and self.book.running:
            self._lose(host, "it came back without its ranks")
        guest.line.send(welcome=self.book.generation)
        return None

    def _put_together(self, theirs: Book) -> None:
        """What a host remembers, with what is known here: after the reception has moved, hosts bring the round back."""
        ours = self.book
        if theirs.generation > ours.generation:
            ours.end(f"generation {theirs.generation} of the same run is known", urgent=True)
            for guest in self.guests:  # who began anew here, because nobody remembered it yet
                if guest.host in ours.hosts and guest.generation == ours.generation:
                    guest.line.send(news=asdict(ours))
            self.book, self.since = theirs, time.monotonic()
        elif theirs.generation == ours.generation and theirs.hosts == ours.hosts:
            if theirs.over:
                self._end(theirs.over, theirs.urgent)
            ours.lost += [host for host in theirs.lost if host not in ours.lost]
            ours.done |= theirs.done
            ours.facts |= theirs.facts
        self._news = True

    def _join(self, guest: Guest, wish: dict[str, Any]) -> None:
        if self.book.finished is not None:
            return self._refuse(guest, "finished", self.book.finished)
        if guest.generation == self.book.generation and self.book.running:
            self._end(f"host {guest.host} came to meet again", urgent=False)
        guest.joined, guest.wish = time.monotonic(), wish
        return None

    def _end(self, why: str, urgent: bool) -> None:
        if not self.book.over:
            self.since = time.monotonic()
        self.book.end(why, urgent)
        self._news = True

    def _lose(self, host: str, why: str) -> None:
        if host not in self.book.hosts:
            return
        if self.book.running:
            self.since = time.monotonic()
        self.book.lose(host, why)
        self._news = True

    def _refuse(self, guest: Guest, kind: str, why: str) -> None:
        guest.line.send(refused=kind, why=why)
        guest.host, guest.joined = "", None  # it hangs up when it has read this

    def _look_after(self, now: float) -> None:
        """Let those go that are out of patience, dead or silent."""
        book = self.book
        tired = [g for g in self.guests if g.joined and now - g.joined + g.wish["waited"] > g.wish["patience"]]
        for guest, why in [(guest, self._why_not(guest)) for guest in tired]:
            self._refuse(guest, "here", why)
        for guest in list(self.guests):
            silent = now - guest.line.heard
            if not guest.line.broken and silent <= self.silence:
                continue
            self.guests.remove(guest)
            if guest.host:
                why = "its connection broke" if guest.line.broken else f"silent for {silent:.1f} s"
                if guest.generation == book.generation:
                    self._lose(guest.host, why)
                guest.line.send(evicted=why)
            guest.line.close()
        there = {guest.host for guest in self.guests}
        if now - self.since > self.silence and book.running:
            for host in book.hosts:
                if host not in there and host not in book.done:
                    self._lose(host, "it did not come back to the meeting")

    def _expected(self, now: float) -> list[str]:
        """Hosts of the last round that may still come to the next one."""
        there = {guest.host: guest for guest in self.guests}
        found = []
        for host in self.book.hosts:
            if host in there:
                late = there[host].joined is None and now - self.since < STRAGGLING
            else:
                gone = host in self.book.lost or host in self.book.done
                late = not gone and now - self.since < self.silence
            if late:
                found.append(host)
        return found

    def _form(self, now: float) -> None:
        """Begin a round if those who are to be in it are there."""
        book = self.book
        waiting = [guest for guest in self.guests if guest.joined is not None]
        least, most = self.terms["nodes"]
        if book.running:
            new = next((guest.host for guest in waiting if guest.host not in book.hosts), "")
            wanted = new if len(book.hosts) < most else ""
            self._news |= wanted != book.wanted
            book.wanted = wanted
            return
        if len(waiting) < least or self._expected(now):
            return
        # before the first round more may be on their way; later everybody is known, and who comes later is let in later
        last = max(guest.joined or 0.0 for guest in waiting)
        early = now - self.opened < MOVING if book.hosts else now - last < self.last_call
        if early and len(waiting) < most:
            return
        place = {host: node for node, host in enumerate(book.hosts)}
        waiting.sort(key=lambda guest: (place.get(guest.host, len(place)), guest.joined or 0.0))
        members = waiting[:most]
        self.book = Book(
            generation=1 + max(book.generation, *(guest.wish["after"] for guest in members)),
            hosts=[guest.host for guest in members],
            ranks=[guest.wish["ranks"] for guest in members],
            address=members[0].wish["address"],
            port=members[0].wish["port"],
        )
        self.since, self._news = now, True
        for guest in members:
            guest.joined, guest.generation = None, self.book.generation

    def _tell(self, now: float) -> None:
        """News to the members, a sign of life to everybody."""
        book = self.book
        finished, beat = book.finished, now - self._beat > self.silence / BEATS
        for guest in self.guests:
            if self._news and guest.host in book.hosts and guest.generation == book.generation:
                guest.line.send(news=asdict(book))
            elif finished is not None and guest.joined is not None:
                self._refuse(guest, "finished", finished)
            elif beat:
                guest.line.send(beat=True)
        self._news = False
        if beat:
            self._beat = now

    def _why_not(self, guest: Guest) -> str:
        waited, (least, most), book = guest.wish["patience"], self.terms["nodes"], self.book
        if book.running:
            full = len(book.hosts) == most
            return (
                f"host {guest.host} waited {waited:g} s for a place in run {self.terms['run']!r}, which has "
                f"{len(book.hosts)} of at most {most} hosts: {', '.join(book.hosts)}. "
                + ("Let it wait longer, or allow more nodes." if full else "Let it wait until they stop to let it in.")
            )
        here = [other.host for other in self.guests if other.joined is not None]
        late = [
            f"{other.host} (still stopping its ranks)" for other in self.guests if other.host and other.joined is None
        ]
        return (
            f"{len(here)} of at least {least} hosts came to run {self.terms['run']!r} in {waited:g} s: "
            f"{', '.join(here + late)}. Start the others with the same address and name, or ask for fewer nodes."
        )
