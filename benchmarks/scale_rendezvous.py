"""The rendezvous server with 1,280 simulated hosts: each a real connection over loopback that proves the run's key.

    python benchmarks/scale_rendezvous.py [--hosts N] [--quick]

The server is the product's own, in a process of its own; another process speaks for all hosts: it says hello, joins,
sends a heartbeat as often as a host does, and notes when the last of them has heard something.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from phalanx.launch import messages
from phalanx.launch.key import Key
from phalanx.launch.lines import Line
from phalanx.launch.messages import Book, encoded
from phalanx.launch.rendezvous_server import BEATS, PURPOSE, VERSION, RendezvousServer
from report import Figure, report

HOSTS = 1280
SILENCE = 5.0
ROUND_BAR = 1.0
KEY = Key(b"of a simulated run")
TERMS = {"run": "'simulated'"}
PATIENCE = 120.0


@dataclass(eq=False)
class Simulated:
    """One host, and what it has heard."""

    name: str
    line: Line
    introduced: bool = False
    heard: bytes = b""
    """The last that was no sign of life."""
    alive: float = 0.0
    """When it last heard anything."""
    gap: float = 0.0
    """How long it heard nothing, at worst."""


@dataclass
class Crowd:
    """All hosts, spoken for by one process."""

    hosts: list[Simulated] = field(default_factory=list)
    poll: select.poll = field(default_factory=select.poll)
    by_number: dict[int, Simulated] = field(default_factory=dict)
    heartbeat: bytes = encoded(messages.Heartbeat())
    beaten: float = 0.0

    def come(self, address: tuple[str, int], count: int) -> float:
        for number in range(count):
            line = Line(socket.create_connection(address), KEY, PURPOSE)
            self.hosts.append(Simulated(f"host-{number:04d}.cluster.example", line))
            self.by_number[line.fileno()] = self.hosts[-1]
            self.poll.register(line.fileno(), select.POLLIN)
            for known, _ in self.poll.poll(0):  # hosts do not wait for each other to answer
                self.listen(self.by_number[known])
        return self.until(lambda host: host.heard.startswith(b'["Welcome"'))

    def join(self) -> float:
        for number, host in enumerate(self.hosts):
            host.line.send(encoded(messages.Join(8, 0, "10.0.0.1", 1024 + number, 600.0, 0.0)))
        return self.until(lambda host: host.heard.startswith(b'["News"'))

    def tell(self, word: str) -> float:
        """All send a sign of life, one of them a fact, and all wait for the news of it."""
        for host in self.hosts:
            host.line.send(self.heartbeat)
        self.hosts[-1].line.send(encoded(messages.Fact(1, "word", word)))
        return self.until(lambda host: word.encode() in host.heard)

    def finish(self) -> float:
        for host in self.hosts:
            host.line.send(encoded(messages.Done(1, "done")))
        last = self.hosts[-1].name.encode()
        return self.until(lambda host: host.heard.count(b'": "done"') == len(self.hosts) and last in host.heard)

    def rest(self, seconds: float) -> float:
        """Nothing but signs of life; the longest that a host heard nothing."""
        for host in self.hosts:
            host.alive, host.gap = time.monotonic(), 0.0
        end = time.monotonic() + seconds
        self.until(lambda host: time.monotonic() > end)
        return max(host.gap for host in self.hosts)

    def until(self, heard: Callable[[Simulated], bool]) -> float:
        """When the last of them has heard it."""
        waiting = set(self.hosts)
        deadline = time.monotonic() + PATIENCE
        while waiting:
            found = [self.by_number[number] for number, _ in self.poll.poll(50)]
            for host in found:
                self.listen(host)
            now = time.monotonic()
            assert now < deadline, f"{len(waiting)} hosts still wait"
            if now - self.beaten > SILENCE / BEATS:
                self.beaten = now
                for host in self.hosts:
                    if host.introduced:
                        host.line.send(self.heartbeat)
            waiting = {host for host in waiting if not heard(host)}
        return time.monotonic()

    def listen(self, host: Simulated) -> None:
        host.line.flush()
        for payload in host.line.receive():
            now = time.monotonic()
            host.gap, host.alive = max(host.gap, now - (host.alive or now)), now
            if payload != self.heartbeat:
                host.heard = payload
        assert not host.line.broken, f"{host.name} was sent away"
        if host.line.proven and not host.introduced:
            host.introduced = True
            host.line.send(encoded(messages.Hello(VERSION, host.name, "1", TERMS, Book())))


def speak(pipe: Connection) -> None:
    """The crowd's process."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    crowd = Crowd()
    while True:
        try:
            name, args = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(crowd, name)(*args))


def figures(hosts: int = HOSTS, rounds: int = 10, seconds: float = 10.0) -> Iterator[Figure]:
    """What the rendezvous server takes, in seconds, with so many hosts."""
    ours, theirs = multiprocessing.Pipe()
    crowd = multiprocessing.get_context("fork").Process(target=speak, args=(theirs,), daemon=True)
    crowd.start()
    theirs.close()
    door = socket.create_server(("127.0.0.1", 0), backlog=1024)
    rendezvous_server = RendezvousServer(door, KEY, "host-0000", TERMS, (hosts, hosts), silence=SILENCE, last_call=1.0)

    def ask(name: str, *args: object) -> float:
        started = time.monotonic()
        ours.send((name, args))
        assert ours.poll(PATIENCE + 60), f"{name}: no answer"
        ended = ours.recv()
        return float(ended if name == "rest" else ended - started)

    try:
        came = ask("come", door.getsockname(), hosts)
        yield Figure(f"{hosts} hosts prove the key and are welcomed", came, None, "seconds, from the first connection")
        yield Figure(f"{hosts} hosts join, and all know the round", ask("join"), None, "seconds")
        spent = time.process_time()
        took = [ask("tell", f"word {number} of many") for number in range(rounds)]
        own = (time.process_time() - spent) / rounds
        said = f"seconds, worst of {rounds}; {own:.2f} s of the rendezvous server's processor a round"
        yield Figure(f"{hosts} signs of life in, news out to all", max(took), ROUND_BAR, said)
        spent = time.process_time()
        gap = ask("rest", seconds)
        share = (time.process_time() - spent) / seconds
        yield Figure("longest that a host heard nothing", gap, SILENCE / 2, f"seconds, in {seconds:g} s of quiet")
        yield Figure("rendezvous server's share of one core in quiet", share, 0.5)
        yield Figure(f"{hosts} hosts are done, and all know it", ask("finish"), SILENCE, "seconds")
        lost = float(len(rendezvous_server.book.lost) + hosts - len(rendezvous_server.guests))
        yield Figure("hosts lost", lost, 0.0)
    finally:
        rendezvous_server.close()
        ours.close()
        crowd.kill()
        crowd.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=HOSTS)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    rounds, seconds = (3, 3.0) if arguments.quick else (10, 10.0)
    report(list(figures(arguments.hosts, rounds, seconds)))


if __name__ == "__main__":
    main()
