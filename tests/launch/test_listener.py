"""A listener lets those in who know the key, whatever strangers do at the same time."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from phalanx.launch import listener as module
from phalanx.launch.key import Key
from phalanx.launch.lines import Line, ready
from phalanx.launch.listener import ConnectionListener

KEY = Key(b"of these tests")


class Served:
    """A listener at work in a thread, as in a supervisor."""

    def __init__(self) -> None:
        self.listener = ConnectionListener(socket.create_server(("localhost", 0), backlog=1024), KEY, "test")
        self.address = self.listener.sock.getsockname()
        self.admitted: list[Line] = []
        self.closing = False
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        while not self.closing:
            self.admitted += self.listener.admitted(ready(self.listener.waited_for(), 0.05), len(self.admitted))

    def close(self) -> None:
        self.closing = True
        self.thread.join()
        for line in self.admitted:
            line.close()
        self.listener.close()

    def enter(self, seconds: float = 5.0) -> float:
        """Somebody who knows the key comes; how long it takes to be let in."""
        started = time.monotonic()
        line = Line(socket.create_connection(self.address), KEY, "test")
        while not line.proven and not line.broken and time.monotonic() < started + seconds:
            ready([line], 0.1)
            line.receive()
        assert line.proven
        line.close()
        return time.monotonic() - started


@pytest.fixture
def served() -> Iterator[Served]:
    one = Served()
    yield one
    one.close()


def closed(connection: socket.socket, seconds: float = 5.0) -> bool:
    connection.settimeout(seconds)
    try:
        while connection.recv(1 << 12):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def test_idle_connections_are_dropped_and_hold_up_nobody(
    served: Served, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "PROVE_SECONDS", 0.5)
    idle = [socket.create_connection(served.address) for _ in range(400)]
    served.enter()
    assert all(closed(connection) for connection in idle)
    for connection in idle:
        connection.close()
    assert len(served.admitted) == 1
    time.sleep(0.1)
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 1, told  # the others are counted in the next, some seconds later
    assert told[0].endswith("closed without proof of the run's key, the last from 127.0.0.1")


@pytest.mark.parametrize("words", [os.urandom(1 << 16), b"[" * 200_000, b"GET / HTTP/1.1\r\n\r\n"])
def test_strangers_are_told_nothing_but_that_this_is_phalanx(served: Served, words: bytes) -> None:
    with socket.create_connection(served.address) as stranger:
        stranger.settimeout(5.0)
        heard = stranger.recv(1 << 12)
        assert len(heard) == 40  # a name and a nonce
        try:
            stranger.sendall(words)
            assert stranger.recv(1 << 12) == b""
        except ConnectionError:
            pass
    served.enter()


def test_running_out_of_file_descriptors_is_survived(served: Served) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    idle = [socket.create_connection(served.address) for _ in range(8)]
    taken = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken - 1, before[1]))  # every accept fails from now on
    child = os.fork()
    if not child:  # which still has some
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for _ in range(20):
            try:
                socket.create_connection(served.address, timeout=1.0)
            except OSError:
                os._exit(1)
        time.sleep(0.5)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    served.enter()
    for connection in idle:
        connection.close()


def test_limits_leave_room_for_what_a_supervisor_does_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, 256))
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: None)  # not this process's own
    with socket.create_server(("localhost", 0)) as sock:
        one = ConnectionListener(sock, KEY, "test")
    assert (one.most_unproven, one.most) == (32, 128)
