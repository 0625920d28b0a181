"""The rendezvous server: one thread, on one host, that knows who is there, who is lost, and when a round begins.

All decisions are made here, one after another, and by this process's own clock: ages of what was heard, never another
host's time. A broken connection is evidence of death: the kernel closes it when a process ends, and a healthy process,
however starved of processors, keeps it. Silence is weaker: it counts after ``silence`` seconds of listening.

The server keeps nothing that a member of the round does not know too (``Book``). So it may end at any time: another
host opens a new one, and what members bring is put together again.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.launch import messages
from phalanx.launch.key import Key
from phalanx.launch.lines import Line, packed, ready
from phalanx.launch.listener import ConnectionListener, note
from phalanx.launch.messages import Book, Message, Unreadable, decoded, encoded
from phalanx.launch.rounds import advice
from phalanx.words import many

PURPOSE = "rendezvous"
VERSION = 3
MOST_FACTS = 1 << 10
TICK = 0.1
BEATS = 10
"""Signs of life, in both directions, in the time after which none at all is a loss."""
MOVING = 0.5
"""Seconds for hosts to find a rendezvous server that has just opened, perhaps after another was lost."""
STRAGGLING = 30.0
"""Seconds for a host of the last round, still there, to stop its ranks and come to the next one."""


@dataclass(eq=False)
class Guest:
    """One connection, and who is behind it once it has said so."""

    line: Line
    host: str = ""
    token: str = ""
    generation: int = 0
    """The last round it was in."""
    joined: float | None = None
    """Since when it has been waiting for a round."""
    wish: messages.Join | None = None
    told: int = 0
    """Which edition of the book it has been sent."""

    def send(self, message: Message) -> None:
        self.line.send(encoded(message))


class RendezvousServer:
    """Serves the hosts of one run at a socket that already listens, until it is closed."""

    def __init__(
        self, door: socket.socket, key: Key, host: str, terms: Mapping[str, str], nodes: tuple[int, int],
        silence: float, last_call: float,
    ) -> None:  # fmt: skip
        """``terms``: what all hosts must agree on, in words."""
        self.host, self.terms, self.nodes, self.silence, self.last_call = host, terms, nodes, silence, last_call
        self.listener = ConnectionListener(door, key, PURPOSE, expected=nodes[1])
        self.book = Book()
        self.guests: list[Guest] = []
        self.since = self.opened = time.monotonic()
        """Since when the book's round has been over, or since when it is known here."""
        self._edition = 0
        """Of the book: one more with every change."""
        self._stir = True
        """Somebody came, went, or said more than that it lives."""
        self._closing = False
        self._beat = self._next_news = 0.0
        self._thread = threading.Thread(target=self._serve, name="rendezvous server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        self._thread.join()

    def _serve(self) -> None:
        last = looked = time.monotonic()
        while not self._closing:
            found = ready([*self.listener.waited_for(), *(guest.line for guest in self.guests)], TICK)
            now = time.monotonic()
            late = now - last > self.silence / BEATS + TICK  # this thread did not listen: nobody was silent meanwhile
            for guest in self.guests:
                if guest.line.fileno() in found:
                    self._listen(guest)
                if late:
                    guest.line.heard = min(now, guest.line.heard + now - last)
            for line in self.listener.admitted(found, len(self.guests)):
                self.guests.append(Guest(line))
            last = now
            if self._stir or now - looked > TICK:  # not for every sign of life, of which there are thousands
                self._stir, looked = False, now
                self._look_after(now)
                self._form(now)
                self._tell(now)
        for guest in self.guests:  # what has come meanwhile, such as why this host leaves, is told before it does
            self._listen(guest)
        self._tell(max(time.monotonic(), self._next_news))
        deadline = time.monotonic() + 1.0
        for guest in self.guests:
            guest.send(messages.Farewell())
        for guest in self.guests:
            guest.line.close(deadline - time.monotonic())
        self.listener.close()

    def _listen(self, guest: Guest) -> None:
        guest.line.flush()
        for payload in guest.line.receive():
            try:
                self._hear(guest, decoded(payload))
            except Unreadable as reason:
                note(f"the connection of host {guest.host or '(no name yet)'} was closed, for what it sent: {reason}")
                guest.line.broken = True
            if guest.line.broken:
                break
        self._stir |= guest.line.broken

    def _hear(self, guest: Guest, message: Message) -> None:
        if isinstance(message, messages.Heartbeat):
            return
        self._stir = True
        book = self.book
        if isinstance(message, messages.Hello):
            self._welcome(guest, message)
        elif not guest.host:
            guest.line.broken = True  # it has not said who it is, or was refused
        elif isinstance(message, messages.Join):
            self._join(guest, message)
        elif isinstance(message, messages.Leave):
            if guest.generation == book.generation and guest.host in book.hosts and guest.host not in book.done:
                book.lost.append(guest.host)
                self._end(f"host {guest.host} left: {message.why}", urgent=True)
            guest.line.broken = True
        elif not isinstance(message, (messages.Failed, messages.Done, messages.Fact)):
            raise Unreadable(f"a {type(message).__name__} is for hosts, not from them")
        elif message.generation == book.generation == guest.generation and guest.host not in book.lost:
            self._edition += 1
            if isinstance(message, messages.Failed):
                self._end(f"host {guest.host} failed: {message.why}", urgent=True)
            elif isinstance(message, messages.Done):
                book.done[guest.host] = message.outcome
            elif len(book.facts) < MOST_FACTS:
                book.facts[message.key] = message.text

    def _welcome(self, guest: Guest, hello: messages.Hello) -> None:
        host = hello.host
        if hello.version != VERSION:
            return self._refuse(
                guest, "use",
                f"host {host} speaks version {hello.version} of the rendezvous's protocol and host {self.host} version "
                f"{VERSION}. Install the same Phalanx on all hosts.",
            )  # fmt: skip
        for key, ours in self.terms.items():
            if (theirs := hello.terms.get(key)) != ours:
                return self._refuse(
                    guest, "use",
                    f"host {host} came for {key} {theirs}, but the rendezvous, opened by host {self.host}, is for "
                    f"{key} {ours}. {advice(key)}",
                )  # fmt: skip
        for other in self.guests:
            if other.host == host and not other.line.broken and other is not guest:
                if other.token != hello.token:
                    return self._refuse(
                        guest, "taken", f"two hosts call themselves {host!r}. Name them apart with --host."
                    )
                other.host, other.line.broken = "", True  # the same one, through a new connection
        guest.host, guest.token, guest.generation = host, hello.token, hello.book.generation
        self._put_together(hello.book)
        if guest.generation < self.book.generation and self.book.running:
            self._lose(host, "it came back without its ranks")
        guest.send(messages.Welcome(self.host, self.book.generation))
        return None

    def _put_together(self, theirs: Book) -> None:
        """What a host remembers, with what is known here: after the server has moved, hosts bring the round back."""
        ours = self.book
        if theirs.generation > ours.generation:
            ours.end(f"generation {theirs.generation} of the same run is known", urgent=True)
            for guest in self.guests:  # who began anew here, because nobody remembered it yet
                if guest.host in ours.hosts and guest.generation == ours.generation:
                    guest.send(messages.News(ours))
            self.book, self.since = theirs, time.monotonic()
        elif theirs.generation == ours.generation and theirs.hosts == ours.hosts:
            if theirs.over:
                self._end(theirs.over, theirs.urgent)
            ours.lost += [host for host in theirs.lost if host not in ours.lost]
            ours.done |= theirs.done
            ours.facts |= theirs.facts
        self._edition += 1

    def _join(self, guest: Guest, wish: messages.Join) -> None:
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
        self._edition += 1

    def _lose(self, host: str, why: str) -> None:
        if host not in self.book.hosts:
            return
        if self.book.running:
            self.since = time.monotonic()
        self.book.lose(host, why)
        self._edition += 1

    def _refuse(self, guest: Guest, kind: str, why: str) -> None:
        guest.send(messages.Refused(kind, why))
        guest.host, guest.joined = "", None  # it hangs up when it has read this

    def _look_after(self, now: float) -> None:
        """Let those go that are out of patience, dead or silent."""
        book = self.book
        tired = [g for g in self.guests if g.joined and g.wish and now - g.joined + g.wish.waited > g.wish.patience]
        for guest, why in [(guest, self._why_not(guest)) for guest in tired]:
            self._refuse(guest, "here", why)
        gone = [g for g in self.guests if g.line.broken or now - g.line.heard > self.silence]
        if gone:
            self.guests = [guest for guest in self.guests if guest not in set(gone)]
        for guest in gone:
            if guest.host:
                why = "its connection broke" if guest.line.broken else f"silent for {now - guest.line.heard:.1f} s"
                if guest.generation == book.generation:
                    self._lose(guest.host, why)
                guest.send(messages.Evicted(why))
            guest.line.close()
        there = {guest.host for guest in self.guests}
        if now - self.since > self.silence and book.running:
            for host in book.hosts:
                if host not in there and host not in book.done:
                    self._lose(host, "it did not come back to the rendezvous")

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

    def awaited(self) -> str:
        """Who is here, and who is waited for; nothing where a round goes on."""
        here = [guest.host for guest in list(self.guests) if guest.joined is not None]
        if self.book.running or not here:
            return ""
        missing = [host for host in self._expected(time.monotonic()) if host not in here]
        more = max(0, self.nodes[0] - len(here))
        whom = ", ".join(missing) or (f"{many(more, 'more host')} at least" if more else "others that may come")
        return f"waits for {whom}; {', '.join(sorted(here))} {'is' if len(here) == 1 else 'are'} here"

    def _form(self, now: float) -> None:
        """Begin a round if those who are to be in it are there."""
        book = self.book
        waiting = [guest for guest in self.guests if guest.joined is not None]
        least, most = self.nodes
        if book.running:
            new = next((guest.host for guest in waiting if guest.host not in book.hosts), "")
            wanted = new if len(book.hosts) < most else ""
            self._edition += wanted != book.wanted
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
        wishes = [guest.wish for guest in members if guest.wish is not None]
        self.book = Book(
            generation=1 + max(book.generation, *(wish.after for wish in wishes)),
            hosts=[guest.host for guest in members],
            ranks=[wish.ranks for wish in wishes],
            address=wishes[0].address,
            port=wishes[0].port,
        )
        self.since = now
        self._edition += 1
        for guest in members:
            guest.joined, guest.generation = None, self.book.generation

    def _tell(self, now: float) -> None:
        """The newest edition of the book to the members, a sign of life to everybody else.

        What all get is made once. Who has not read the last yet gets the newest later: nobody is waited for. And at
        most half of the time goes into telling, so that signs of life are heard however much there is to tell.
        """
        book, finished = self.book, self.book.finished
        heartbeat, tell = now - self._beat > self.silence / BEATS, now >= self._next_news
        news, alive = None, packed(encoded(messages.Heartbeat()))
        members = set(book.hosts)
        for guest in self.guests:
            member = guest.host in members and guest.generation == book.generation
            if tell and member and guest.told != self._edition and not guest.line.unsent:
                news = news or packed(encoded(messages.News(book)))
                guest.told = self._edition
                guest.line.send(news)
            elif finished is not None and guest.joined is not None:
                self._refuse(guest, "finished", finished)
            elif heartbeat and not guest.line.unsent:
                guest.line.send(alive)
        if heartbeat:
            self._beat = now
        if news is not None:
            ended = time.monotonic()
            self._next_news = ended + (ended - now)
        elif not tell:
            self._stir = True  # come back as soon as it may be told

    def _why_not(self, guest: Guest) -> str:
        assert guest.wish is not None
        waited, (least, most), book = guest.wish.patience, self.nodes, self.book
        if book.running:
            full = len(book.hosts) == most
            return (
                f"host {guest.host} waited {waited:g} s for a place in run {self.terms['run']}, which has "
                f"{len(book.hosts)} of at most {most} hosts: {', '.join(book.hosts)}. "
                + ("Let it wait longer, or allow more nodes." if full else "Let it wait until they stop to let it in.")
            )
        here = [other.host for other in self.guests if other.joined is not None]
        late = [
            f"{other.host} (still stopping its ranks)" for other in self.guests if other.host and other.joined is None
        ]
        return (
            f"{len(here)} of at least {least} hosts came to run {self.terms['run']} in {waited:g} s: "
            f"{', '.join(here + late)}. Start the others with the same address and name, or ask for fewer nodes."
        )
