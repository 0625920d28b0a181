"""Supervisors meet: each is a process of its own, which is told what to do through a pipe."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from phalanx import CannotHere, WrongUse
from phalanx.launch import rendezvous as module
from phalanx.launch.key import Key
from phalanx.launch.lines import CHALLENGE_BYTES, MAGIC
from phalanx.launch.rank_store import RankStore, StoreServer
from phalanx.launch.rendezvous import Rendezvous
from phalanx.launch.rounds import Round, RoundChange

KEY = Key(b"of these tests")
LONG = 20.0
"""Seconds after which a test gives up; nothing here takes that long."""


class Seat:
    """What a host can be told to do, besides what its rendezvous can."""

    def __init__(self, rendezvous: Rendezvous, pipe: Connection) -> None:
        self.rendezvous, self.pipe = rendezvous, pipe

    def next(self, *args: Any) -> Round | None:
        self.round = self.rendezvous.next(*args)
        return self.round and dataclasses.replace(self.round, listening=None)  # a socket does not travel

    def come(self) -> Round | None:
        """The same, but say so as soon as the host has come, before the others are there."""
        come = threading.Event()

        def asked() -> bool:
            wish = self.rendezvous._wish
            if not come.is_set() and (wish is None or wish["sent"]):
                come.set()
                self.pipe.send("come")
            return False

        answer = self.next(0, asked)
        asked()
        return answer

    def finished(self) -> str | None:
        return self.until(lambda: self.rendezvous.finished)

    def get(self, key: str, seconds: float = LONG) -> str | None:
        return self.until(lambda: self.rendezvous.get(key), seconds)

    def change(self, seconds: float = LONG) -> RoundChange | None:
        return self.until(self.rendezvous.changed, seconds)

    def until(self, known: Callable[[], Any], seconds: float = LONG) -> Any:
        deadline = time.monotonic() + seconds
        while (answer := known()) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return answer

    def fork(self) -> None:
        """A rank that outlives its supervisor, as one may that hangs in a driver."""
        if not os.fork():
            time.sleep(LONG)
            os._exit(0)

    def compute(self, seconds: float) -> RoundChange | None:
        """Never let go of the interpreter, but for what it takes itself."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pass
        return self.rendezvous.changed()

    def read_store(self) -> str:
        """Node 0 opens the round's store and says which round it is for; the others read that."""
        one = self.round
        assert one is not None
        if one.listening is not None:
            self.server = StoreServer(one.listening, KEY, one.nodes)
        store = RankStore(one.address, one.port, KEY, timedelta(seconds=LONG))
        if one.listening is not None:
            store.set("generation", str(one.generation))
        return store.get("generation").decode()


def supervisor(pipe: Connection, version: int, settings: dict[str, Any]) -> None:
    module.VERSION = version
    settings = {"key": KEY, **settings}
    if "key_of" in settings:
        settings["key"] = Key(settings.pop("key_of").encode())
    rendezvous = Rendezvous(**settings)
    seat = Seat(rendezvous, pipe)
    while True:
        try:
            name, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send(getattr(seat if hasattr(seat, name) else rendezvous, name)(*args))
        except Exception as error:
            pipe.send(error)


class Host:
    """The test's end of it."""

    def __init__(self, version: int, settings: dict[str, Any]) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=supervisor, args=(theirs, version, settings))
        self.process.start()
        theirs.close()

    def start(self, name: str, *args: Any) -> Host:
        self.pipe.send((name, args))
        return self

    def answer(self) -> Any:
        assert self.pipe.poll(LONG), "no answer"
        return self.pipe.recv()

    def ask(self, name: str, *args: Any) -> Any:
        return self.start(name, *args).answer()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture
def port() -> int:
    with socket.create_server(("localhost", 0)) as free:
        return free.getsockname()[1]


@pytest.fixture
def host(port: int) -> Iterator[Callable[..., Host]]:
    """Starts a host: ``host("a", 2, 3)`` is host a, for a run of 2 to 3 nodes."""
    hosts: list[Host] = []

    def start(host: str, least: int, most: int, /, version: int = module.VERSION, **settings: Any) -> Host:
        usual = {
            "address": f"localhost:{port}", "name": "run", "ranks": 2, "min_nodes": least, "max_nodes": most,
            "host": host, "last_call": 0.5, "patience": LONG,
        }  # fmt: skip
        hosts.append(Host(version, usual | settings))
        return hosts[-1]

    yield start
    for one in hosts:
        one.end()
        one.pipe.close()


def meet(*hosts: Host) -> Round:
    """They all join; returns the round as the first of them sees it, once all were seen to mean the same."""
    for one in hosts:
        one.start("next")
    return met(*hosts)


def met(*hosts: Host) -> Round:
    rounds = [one.answer() for one in hosts]
    assert all(isinstance(each, Round) for each in rounds), rounds
    assert len({(each.generation, *each.hosts, each.address, each.port) for each in rounds}) == 1, rounds
    assert sorted(each.node for each in rounds) == list(range(len(hosts)))
    return rounds[0]


def in_turn(host: Callable[..., Host], least: int, most: int, names: str, **settings: Any) -> list[Host]:
    """Hosts that come one after another: they are in that order, and the first has the rendezvous server."""
    hosts = []
    for name in names:
        hosts.append(host(name, least, most, **{"last_call": 3.0, **settings}).start("come"))
        assert hosts[-1].answer() == "come"
    assert "".join(met(*hosts).hosts) == names
    return hosts


def test_hosts_agree_who_is_in_and_share_a_new_store_each_round(host: Callable[..., Host]) -> None:
    a, b, c = (host(name, 3, 3, ranks=ranks) for name, ranks in (("a", 1), ("b", 2), ("c", 3)))
    first = meet(a, b, c)
    assert first.generation == 1
    assert dict(zip(first.hosts, first.ranks, strict=True)) == {"a": 1, "b": 2, "c": 3}
    assert [one.answer() for one in [one.start("read_store") for one in (a, b, c)]] == ["1"] * 3
    b.ask("failed", "rank 3 raised KeyError")
    for one in (a, b, c):
        assert one.ask("change") == RoundChange("host b failed: rank 3 raised KeyError", urgent=True)
    second = meet(c, a, b)
    assert (second.generation, second.hosts) == (2, first.hosts)
    assert second.port != first.port
    assert [one.ask("change", 0.3) for one in (a, b, c)] == [None] * 3


def test_a_killed_host_is_noticed_although_its_ranks_still_hold_on(host: Callable[..., Host]) -> None:
    a, b, c = in_turn(host, 2, 3, "abc", silence=LONG)
    c.ask("fork")
    c.end()
    for one in (a, b):
        assert one.ask("change") == RoundChange("host c was lost: its connection broke", urgent=True)
    again = meet(b, a)
    assert (again.generation, again.hosts) == (2, ["a", "b"])


def test_survivors_of_the_servers_host_meet_again(host: Callable[..., Host]) -> None:
    a, b, c = in_turn(host, 2, 3, "abc", silence=LONG)
    a.ask("fork")
    a.end()
    for one in (b, c):
        change = one.ask("change")
        assert change.urgent
        assert "host a was lost" in change.why
    again = meet(c, b)
    assert (again.generation, again.hosts) == (2, ["b", "c"])
    assert [one.ask("read_store") for one in (b, c)] == ["2", "2"]
    b.end()
    assert "host b was lost" in c.ask("change").why
    a = host("a", 2, 3, silence=LONG)
    last = meet(c, a)
    assert (last.generation, last.hosts) == (3, ["c", "a"])


def test_the_server_moves_when_its_host_leaves(host: Callable[..., Host]) -> None:
    a, b, c = in_turn(host, 2, 3, "abc")
    a.ask("leave", "stopped by the user")
    assert [one.ask("change") for one in (b, c)] == [RoundChange("host a left: stopped by the user", urgent=True)] * 2
    assert meet(b, c).hosts == ["b", "c"]
    d = host("d", 2, 3).start("next")
    assert [one.ask("change") for one in (b, c)] == [RoundChange("host d wants to join", urgent=False)] * 2
    b.start("next")
    c.start("next")
    again = met(b, c, d)
    assert (again.generation, again.hosts) == (3, ["b", "c", "d"])


def test_a_round_goes_on_when_the_lost_host_had_only_its_server(host: Callable[..., Host]) -> None:
    a = host("a", 2, 2, patience=0.5, silence=1.5)
    assert isinstance(a.ask("next"), CannotHere)
    b, c = host("b", 2, 2, silence=1.5), host("c", 2, 2, silence=1.5)
    meet(b, c)
    b.ask("put", "resume", "step 40")
    assert c.ask("get", "resume") == "step 40"
    a.end()
    assert [one.answer() for one in [one.start("change", 2.0) for one in (b, c)]] == [None, None]
    c.ask("failed", "rank 3")
    assert b.ask("change") == RoundChange("host c failed: rank 3", urgent=True)
    assert b.ask("get", "resume") == "step 40"
    assert meet(b, c).generation == 2


def test_a_stopped_host_is_given_up_and_told_so(host: Callable[..., Host]) -> None:
    a, b, c = in_turn(host, 2, 3, "abc", silence=2.0)
    c.signal(signal.SIGSTOP)
    for one in (a, b):
        change = one.ask("change")
        assert change.urgent
        assert "host c was lost: silent for" in change.why
    assert meet(a, b).hosts == ["a", "b"]
    c.signal(signal.SIGCONT)
    change = c.ask("change", 0.0)  # at once: it must not go on as if nothing had happened
    assert change is not None
    assert change.urgent
    c.start("next")
    assert [one.ask("change") for one in (a, b)] == [RoundChange("host c wants to join", urgent=False)] * 2
    a.start("next")
    b.start("next")
    again = met(a, b, c)
    assert (again.generation, again.hosts) == (3, ["a", "b", "c"])


def test_all_meet_again_after_the_servers_host_was_stopped(host: Callable[..., Host]) -> None:
    a, b, c = in_turn(host, 2, 3, "abc", silence=1.5)
    a.signal(signal.SIGSTOP)
    assert all(one.ask("change").urgent for one in (b, c))
    b.start("next")
    c.start("next")
    time.sleep(1.0)  # the address is still a's, so they cannot go on without it
    a.signal(signal.SIGCONT)
    assert a.ask("change") is not None  # by its own clock at once, or because the others wait for it
    a.start("next")
    rounds: dict[Host, Round] = {}
    while len(rounds) < 3:
        waiting = {one.pipe: one for one in (a, b, c) if one not in rounds}
        ready = wait(list(waiting), timeout=LONG)
        assert ready, rounds
        rounds |= {one: one.answer() for pipe, one in waiting.items() if pipe in ready}
        if [len(one.hosts) for one in rounds.values()] == [2, 2]:  # both were quicker than the third
            for one in rounds:
                one.start("next")  # and let it in
            rounds = {}
    assert [sorted(one.hosts) for one in rounds.values()] == [["a", "b", "c"]] * 3


def test_a_busy_host_is_not_a_silent_one(host: Callable[..., Host]) -> None:
    a, b = in_turn(host, 2, 2, "ab", silence=2.0)
    a.start("compute", 2.6)
    b.start("compute", 2.6)
    assert [a.answer(), b.answer()] == [None, None]


def test_a_host_waits_for_a_place_until_one_gets_free(host: Callable[..., Host]) -> None:
    a, b = in_turn(host, 1, 2, "ab")
    c = host("c", 1, 2, patience=0.5)
    refusal = c.ask("next")
    assert isinstance(refusal, CannotHere)
    assert "waited 0.5 s for a place in run 'run', which has 2 of at most 2 hosts: a, b." in str(refusal)
    d = host("d", 1, 2).start("next")
    assert a.ask("change", 0.3) is None
    a.ask("leave", "its user wants it back")
    assert b.ask("change").why == "host a left: its user wants it back"
    b.start("next")
    assert met(b, d).hosts == ["b", "d"]


def test_the_run_is_finished_when_all_hosts_are(host: Callable[..., Host]) -> None:
    a, b = in_turn(host, 1, 3, "ab", last_call=1.0)
    b.ask("finish", "trained")
    assert a.ask("change", 0.3) is None
    waiting = host("c", 1, 3).start("next")
    a.ask("finish", "trained")
    assert [one.ask("finished") for one in (a, b)] == ["trained", "trained"]
    late = host("d", 1, 3)
    for refusal in (waiting.answer(), late.ask("next"), b.ask("next")):
        assert isinstance(refusal, CannotHere)
        assert str(refusal) == "run 'run' is finished: trained. There is nothing left to do."
    assert late.ask("finished") == "trained"


def test_a_host_may_go_once_it_has_finished(host: Callable[..., Host]) -> None:
    a, b, c = in_turn(host, 2, 3, "abc", silence=1.5)
    a.ask("finish", "trained")
    a.ask("close")  # with it the rendezvous server
    assert [one.answer() for one in [one.start("change", 2.0) for one in (b, c)]] == [None, None]
    b.ask("finish", "trained")
    b.ask("close")
    c.ask("finish", "trained")
    assert c.ask("finished") == "trained"


def test_facts_are_known_to_all_hosts_of_a_round_and_no_longer(host: Callable[..., Host]) -> None:
    a, b = in_turn(host, 1, 2, "ab")
    a.ask("put", "resume", "step 40")
    assert b.ask("get", "resume") == "step 40"
    b.ask("failed", "")
    assert all(one.ask("change") for one in (a, b))
    meet(a, b)
    assert [one.ask("get", "resume", 0.0) for one in (a, b)] == [None, None]


def test_generations_go_on_after_what_a_caller_remembers(host: Callable[..., Host]) -> None:
    assert met(host("a", 2, 2).start("next", 7), host("b", 2, 2).start("next", 3)).generation == 8


def test_enough_hosts_meet_after_the_last_call(host: Callable[..., Host]) -> None:
    assert met(host("a", 1, 2).start("next")).hosts == ["a"]


def test_too_few_hosts_are_told_who_came(host: Callable[..., Host]) -> None:
    a, b = host("a", 3, 3, patience=1.0).start("next"), host("b", 3, 3, patience=LONG).start("next")
    refusal = a.answer()
    assert isinstance(refusal, CannotHere)
    assert str(refusal).startswith("2 of at least 3 hosts came to run 'run' in 1 s: ")
    assert str(refusal).endswith("Start the others with the same address and name, or ask for fewer nodes.")
    c, d = host("c", 3, 3).start("next"), host("d", 3, 3).start("next")
    assert met(b, c, d).generation == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host": "a"}, "two hosts call themselves 'a'. Name them apart with --host."),
        ({"name": "other"}, "host b came for run 'other', but the rendezvous, opened by host a, is for run 'run'"),
        ({"max_nodes": 3}, "host b came for nodes [2, 3], but the rendezvous, opened by host a, is for nodes [2, 2]"),
        ({"key_of": "another"}, "is for those who know another key than host b. Give all hosts the same --run folder"),
        ({"version": 0}, "host b speaks version 0 of the rendezvous's protocol and host a version 3. Install the same"),
    ],
)
def test_hosts_that_do_not_belong_are_refused(host: Callable[..., Host], settings: dict[str, Any], words: str) -> None:
    a = host("a", 2, 2, silence=1.0).start("next")
    time.sleep(0.3)
    refusal = host("b", 2, 2, silence=1.0, **settings).ask("next")
    assert isinstance(refusal, CannotHere if "key_of" in settings else WrongUse)
    assert words in str(refusal)
    assert met(a, host("b", 2, 2, silence=1.0).start("next")).nodes == 2


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_port_that_is_anothers_is_refused(says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENT", 2)
    with socket.create_server(("localhost", 0)) as other:

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(says)
                connection.recv(100)

        thread = threading.Thread(target=answer)
        thread.start()
        rendezvous = Rendezvous(
            f"localhost:{other.getsockname()[1]}", key=KEY, name="run", ranks=1, min_nodes=1, max_nodes=1, silence=0.5
        )
        with pytest.raises(CannotHere, match=r"is not a rendezvous of Phalanx, or is stopped\. Choose another port"):
            rendezvous.next()
        rendezvous.close()
        thread.join()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"min_nodes": 3}, "at least 3 and at most 2 nodes cannot be. Ask for 1 <= min <= max."),
        ({"ranks": 0}, "brings 0 ranks. Bring at least one."),
        ({"silence": 0.1}, "cannot be given up after 0.1 s of silence. Wait at least 0.5 s."),
        ({"address": "0.0.0.0:29400"}, "means every address of every host. Give the one"),
        ({"address": "node1"}, "'node1' is no address to meet at. Write it as host:port"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    usual: dict[str, Any] = {
        "address": "localhost:29400", "key": KEY, "name": "run", "ranks": 1, "min_nodes": 1, "max_nodes": 2,
    }  # fmt: skip
    with pytest.raises(WrongUse) as refusal:
        Rendezvous(**usual | settings)
    assert words in str(refusal.value)


def test_waiting_ends_when_the_caller_is_asked_to_stop_and_nothing_is_left(port: int) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = open_files()
    rendezvous = Rendezvous(f"localhost:{port}", key=KEY, name="run", ranks=1, min_nodes=2, max_nodes=2)
    started = time.monotonic()
    assert rendezvous.next(asked=lambda: time.monotonic() - started > 0.5) is None
    assert threading.active_count() > 1
    rendezvous.leave("asked to stop")
    rendezvous.close()
    assert open_files() == before


def test_a_host_that_waits_says_for_whom(port: int) -> None:
    several = [
        Rendezvous(f"localhost:{port}", key=KEY, name="run", ranks=1, min_nodes=3, max_nodes=3, host=host)
        for host in "ab"
    ]
    said: dict[str, set[str]] = {"a": set(), "b": set()}
    started = time.monotonic()

    def asked(rendezvous: Rendezvous) -> bool:
        said[rendezvous.host].add(rendezvous.awaited())
        return time.monotonic() - started > 3.0

    threads = [threading.Thread(target=m.next, kwargs={"asked": partial(asked, m)}) for m in several]
    for thread in threads:
        thread.start()
        time.sleep(0.5)
    for thread in threads:
        thread.join()
    assert "waits for 2 more hosts at least; a is here" in said["a"]
    assert "waits for 1 more host at least; a, b are here" in said["a"]
    waits = "waits at host a, which says for whom, until 3 or more are there"
    assert f"{waits}, and this one has a place among at most 3" in said["b"]
    for rendezvous in reversed(several):
        assert rendezvous.awaited() == ""
        rendezvous.close()


class Between:
    """A stranger on the path: passes on what a host and the rendezvous say, and keeps it."""

    def __init__(self, to: int) -> None:
        self.door = socket.create_server(("localhost", 0))
        self.port, self.to = self.door.getsockname()[1], to
        self.said: list[bytes] = []
        self.thread = threading.Thread(target=self.pass_on)
        self.thread.start()

    def pass_on(self) -> None:
        theirs, ours = self.door.accept()[0], socket.create_connection(("localhost", self.to))

        def back() -> None:
            while some := ours.recv(1 << 12):
                theirs.sendall(some)

        thread = threading.Thread(target=back)
        thread.start()
        while some := theirs.recv(1 << 12):
            self.said.append(some)
            ours.sendall(some)
        ours.shutdown(socket.SHUT_RDWR)
        thread.join()
        theirs.close()
        ours.close()

    def close(self) -> None:
        self.thread.join()
        self.door.close()


def answered(port: int, words: bytes) -> bytes:
    """What comes back until the rendezvous hangs up."""
    found = b""
    with socket.create_connection(("localhost", port), timeout=10.0) as sock:
        try:
            sock.sendall(words)
            while some := sock.recv(1 << 12):
                found += some
        except ConnectionError:
            pass
    return found


def test_a_meeting_bears_with_strangers(host: Callable[..., Host], port: int) -> None:
    """Also with one who was on the path, and says again what it has heard."""
    a = host("a", 2, 2, silence=1.5).start("come")
    assert a.answer() == "come"
    between = Between(port)
    b = host("b", 2, 2, silence=1.5, address=f"localhost:{between.port}").start("next")
    assert met(a, b).hosts == ["a", "b"]
    recorded = b"".join(between.said)
    idle = [socket.create_connection(("localhost", port)) for _ in range(400)]
    chosen = random.Random(3)
    attempts = [
        recorded,
        b"[" * 200_000 + b"\n",
        b'{"hello": {"host": [], "book": {"hosts": 7}}}\n{"join": {}}\n',
        MAGIC + chosen.randbytes(64),
        *(chosen.randbytes(chosen.choice((1, 72, 5000))) + b"\n" * 72 for _ in range(40)),
    ]
    heard = [answered(port, words) for words in attempts]
    assert {words[: len(MAGIC)] for words in heard} <= {MAGIC, b""}
    assert all(len(words) <= CHALLENGE_BYTES for words in heard)
    assert [one.ask("change", 0.5) for one in (a, b)] == [None, None]
    for sock in idle:
        sock.close()
    a.ask("finish", "trained")
    b.ask("finish", "trained")
    assert [one.ask("finished") for one in (a, b)] == ["trained", "trained"]
    b.ask("close")
    between.close()
