"""Supervisors of several hosts meet, agree on who is in, and notice who is lost. A round is one generation of ranks.

Whoever can bind the address opens the ``RendezvousServer``; the others connect to it. If that host is lost, the next
that can bind the address opens a new one, and the round goes on or the next begins from what members remember. On one
machine that is any of them. On several, the address belongs to one host: choose one that stays.

A thread of the supervisor keeps in touch, so that a busy supervisor is not a silent one, while a stopped one is. It
takes no lock, imports nothing and resolves no name, and its sockets are closed in every forked child (``lines``): ranks
can be forked at any time, and a child need do nothing. In a child a ``Rendezvous`` is dead.

Not torch's rendezvous: it compares clocks (10 s apart, three hosts were told worlds of 3, 3 and 1), never says that a
host was lost, needs 4 to 45 s to meet again after kill -9, and does not survive its store's host. Not a TCPStore: its
server sees a connection break, but tells nobody.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from phalanx.errors import CannotHere, WrongUse
from phalanx.launch import messages, network
from phalanx.launch.lines import Line, not_for_children, ready
from phalanx.launch.messages import Book, Message, Unreadable, decoded, encoded, shortened
from phalanx.launch.rendezvous_server import BEATS, PURPOSE, TICK, VERSION, RendezvousServer
from phalanx.launch.rounds import Round, RoundChange
from phalanx.launch.seat import Seat

PATIENT = 6
"""So many times longer than for a member's word is waited for a greeting: a stopped host may go on."""
LOOK_SECONDS = 5.0
"""A host that reaches nobody looks the rendezvous's name up again so often."""
TURNED_AWAY = 1.0
"""Seconds without once being let in, after which it was no accident."""


class RunIsFinished(CannotHere):
    """All hosts of the run have come to its end: who comes, or has waited for a place, is not needed."""


class Rendezvous(Seat):
    """A host's seat, taken: ``next()`` awaits a round, ``changed()`` says when it is over, ``leave()`` ends it all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._token, self._pid = secrets.token_hex(8), os.getpid()
        self._book = Book()
        self._finished: str | None = None
        self._server_here: RendezvousServer | None = None
        # between the caller and the thread: each of these is written whole, by one of them, and needs no lock
        self._wish: dict[str, Any] | None = None
        self._outbox: deque[Message] = deque()
        self._refusal: Exception | None = None
        self._attending = self._closing = False
        self._leaving = "its rendezvous was closed"
        self._news = threading.Event()
        self._thread: threading.Thread | None = None
        self._bell, self._ring = (not_for_children(end) for end in socket.socketpair())
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        # the thread's own
        self._line: Line | None = None
        self._welcomed = self._farewell = self._introduced = False
        self._server, self._heard, self._beat = "", time.monotonic(), 0.0
        self._taken = self._mute = self._away = self._dial_again = 0.0

    def next(self, after: int = 0, asked: Callable[[], bool] | None = None) -> Round | None:
        """Wait for a round, of a generation larger than ``after``. None: ``asked()`` said that somebody wants to stop.

        Those of the last round who are still there are waited for; others are not, but can join later.
        """
        if self.finished is not None:
            raise self._run_is_finished(self.finished)
        began = time.monotonic()
        door = self.new_door(asked)
        if door is None:
            return None
        self._refusal = None
        self._wish = {"ranks": self.ranks, "after": after, "port": door.getsockname()[1], "began": began, "sent": False}
        self._attending = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._attend, name=f"rendezvous of {self.host}", daemon=True)
            self._thread.start()
        self._wake()
        looked = began
        try:
            while self._wish is not None:
                if self._refusal is not None:
                    raise self._refusal
                if asked is not None and asked():
                    return None
                if time.monotonic() - began > self.patience + (self.silence if self._welcomed else 0):
                    raise self.nobody()
                if self._line is None and self._server_here is None and time.monotonic() - looked > LOOK_SECONDS:
                    self.look_again()
                    looked = time.monotonic()
                self._news.wait(0.1)
                self._news.clear()
            book = self._book
            node = book.hosts.index(self.host)
            listening = None if node else door.dup()
            through = self.way.interface
            address = network.scoped(book.address, through)
            return Round(book.generation, node, book.hosts, book.ranks, address, book.port, through, listening)
        finally:
            self._wish = None
            door.close()

    def awaited(self) -> str:
        """For whom this host waits, in words; nothing while it does not know, or does not wait."""
        if self._wish is None:
            return ""
        if self._server_here is not None:
            return self._server_here.awaited()
        if not self._welcomed:
            return f"waits for the host that opens the rendezvous at {self.address}: nobody answers there yet"
        return (
            f"waits at host {self._server}, which says for whom, until {self.min_nodes} or more are there, and this "
            f"one has a place among at most {self.max_nodes}"
        )

    def changed(self) -> RoundChange | None:
        """Whether this round is over; cheap, to be asked often."""
        book, age = self._book, time.monotonic() - self._heard
        if book.over:
            return RoundChange(book.over, book.urgent)
        if age > self.silence and book.finished is None:  # also right after this process was stopped for a while
            return RoundChange(
                f"host {self.host} has heard nothing from the rendezvous at {self.address} for {age:.1f} s", True
            )
        if book.wanted and len(book.hosts) < self.max_nodes:
            return RoundChange(f"host {book.wanted} wants to join", False)
        return None

    def failed(self, reason: str) -> None:
        """Ranks of this host failed: the others need not find out by themselves."""
        self._say(messages.Failed(self._book.generation, shortened(reason)))

    def finish(self, outcome: str) -> None:
        """All ranks of this host returned. The run is ``finished`` when every host of the round said so."""
        self._book.done = {**self._book.done, self.host: outcome}
        self._say(messages.Done(self._book.generation, shortened(outcome)))

    @property
    def finished(self) -> str | None:
        """The run's outcome, once all hosts have finished."""
        return self._finished if self._finished is not None else self._book.finished

    def put(self, key: str, text: str) -> None:
        """Let all hosts of this round know a small fact."""
        self._book.facts = {**self._book.facts, key: text}  # whole, for the thread
        self._say(messages.Fact(self._book.generation, key, text))

    def get(self, key: str) -> str | None:
        """A fact of this round, if it is known here yet."""
        return self._book.facts.get(key)

    def leave(self, reason: str) -> None:
        """Tell the others that this host is done for good, and close."""
        self._leaving = reason
        self.close()

    def close(self) -> None:
        """End the thread and the connections; if the server is here, it moves to another host that can have it."""
        if self._closing or self._pid != os.getpid():
            return
        self._closing = True
        self._wake()
        if self._thread is not None:
            self._thread.join()
        if self._server_here is not None:
            self._server_here.close()
        self._bell.close()
        self._ring.close()

    def _say(self, message: Message) -> None:
        self._outbox.append(message)
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # full: it has been rung already
            self._ring.send(b"!")

    # from here on: the thread

    def _attend(self) -> None:
        while not self._closing:
            if self._line is None and self._attending and time.monotonic() >= self._dial_again:
                self._dial()
            ready([self._bell] if self._line is None else [self._bell, self._line], TICK)
            with suppress(OSError):
                self._bell.recv(1 << 12)
            if self._line is not None:
                self._converse(self._line)
        if self._line is not None:
            if self._welcomed:
                self._empty_outbox(self._line)
                self._line.send(encoded(messages.Leave(shortened(self._leaving))))
            self._line.close(patience=1.0)

    def _dial(self) -> None:
        way = self.way
        sock = socket.socket(way.family)
        sock.settimeout(1.0)
        try:
            sock.connect(network.sockaddr(way.to, self.port, way.interface))
            if sock.getsockname() == sock.getpeername():  # a port nobody listens at can be connected to itself
                raise ConnectionRefusedError
        except OSError:
            sock.close()
            self._open_server()
            return
        self._line, self._server = Line(sock, self.key, PURPOSE), ""
        self._introduced = False
        self._mute = self._mute or time.monotonic()
        self._welcomed = self._farewell = False
        if self._wish is not None:
            self._wish["sent"] = False

    def _open_server(self) -> None:
        if self._server_here is not None:
            return
        try:
            door = network.listen(self.way.to, self.port, self.way.interface)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):  # another's turn: it will answer soon
                self._refuse(CannotHere(f"cannot open a rendezvous at {self.address}: {error}. Choose another port."))
            return
        self._server_here = RendezvousServer(
            door, self.key, self.host, self.agreed, (self.min_nodes, self.max_nodes), self.silence, self.last_call
        )

    def _converse(self, line: Line) -> None:
        now = time.monotonic()
        for payload in line.receive():
            self._heard = now
            try:
                self._hear(decoded(payload))
            except Unreadable:
                line.strange = True
            self._news.set()
        if line is not self._line:  # refused
            return
        if line.proven and not self._introduced:
            self._introduced, self._mute, self._away = True, 0.0, 0.0
            line.send(encoded(messages.Hello(VERSION, self.host, self._token, self.agreed, self._book)))
        if line.broken and not line.proven and (line.tried or self.met):
            self._away = self._away or now
            if not self.met and now - self._away > TURNED_AWAY:
                self._refuse(self.turned_away())
            else:
                self._hang_up("")
                self._dial_again = now + TURNED_AWAY / 10
        elif line.strange:
            self._refuse(self.stranger())
        elif line.broken:
            self._hang_up("its connection broke, and it hosted the rendezvous")
        elif now - line.heard > self.silence:
            if not self._server and not self.met and now - self._mute > PATIENT * self.silence:
                self._refuse(self.stranger())
            else:
                self._hang_up(f"silent for {now - line.heard:.1f} s, and it hosted the rendezvous")
        elif self._welcomed:
            self._empty_outbox(line)
            if self._wish is not None and not self._wish["sent"]:
                self._wish["sent"] = True
                line.send(encoded(self._wished(self._wish, self.way.own, now)))
            if now - self._beat > self.silence / BEATS:
                self._beat = now
                line.send(encoded(messages.Heartbeat()))

    def _wished(self, wish: dict[str, Any], address: str, now: float) -> messages.Join:
        waited = now - wish["began"]
        return messages.Join(wish["ranks"], wish["after"], address, wish["port"], self.patience, waited)

    def _empty_outbox(self, line: Line) -> None:
        while self._outbox:
            line.send(encoded(self._outbox.popleft()))
        line.flush()

    def _hear(self, message: Message) -> None:
        if isinstance(message, messages.Welcome):
            self._server, self._welcomed, self.met, self._taken = message.host, True, True, 0.0
            if message.generation > self._book.generation and self._book.running:
                self._book.end(f"the others went on without host {self.host}", urgent=True)
        elif isinstance(message, messages.News):
            book = message.book
            if book.generation > self._book.generation:
                self._wish = None
            if book.generation >= self._book.generation:
                self._book = book
        elif isinstance(message, messages.Evicted):
            self._book.end(f"the others gave host {self.host} up: {message.why}", urgent=True)
        elif isinstance(message, messages.Farewell):
            self._farewell = True
        elif isinstance(message, messages.Refused):
            self._refused(message.kind, message.why)
        elif not isinstance(message, messages.Heartbeat):
            raise Unreadable(f"a {type(message).__name__} is from hosts, not for them")

    def _refused(self, kind: str, why: str) -> None:
        if kind == "taken":  # perhaps by this very host before it was started anew, and nobody has noticed yet
            self._taken = self._taken or time.monotonic()
            if time.monotonic() - self._taken < self.silence + 1.0:
                self._hang_up("")
                return
        if kind == "finished":
            self._finished = why
            self._refuse(self._run_is_finished(why))
        else:
            self._refuse(WrongUse(why) if kind in ("use", "taken") else CannotHere(why))

    def _run_is_finished(self, outcome: str) -> RunIsFinished:
        return RunIsFinished(f"run {self.name!r} is finished: {outcome}. There is nothing left to do.")

    def _refuse(self, error: Exception) -> None:
        """The caller's ``next()`` raises this, and nobody is called again until the one after."""
        self._attending, self._refusal = False, error
        self._hang_up("")
        self._news.set()

    def _hang_up(self, lost: str) -> None:
        """Let the connection go; if that means that the rendezvous server's host is lost, and how."""
        if lost and self._welcomed and not self._farewell and self._server != self.host:
            self._book.lose(self._server, lost)
        if self._line is not None:
            self._line.close()
        self._line, self._welcomed = None, False
