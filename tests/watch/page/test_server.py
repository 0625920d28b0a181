"""The server shows the runs it was given and nothing else, to those who may see them."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from phalanx.errors import CannotHere, WrongUse
from phalanx.watch.http_server import HEAD_SECONDS, MOST_CONNECTIONS
from phalanx.watch.page import assets
from phalanx.watch.page.answers import RunPages
from phalanx.watch.page.server import check, serve
from phalanx.watch.page.watching import runs_of
from tests.watch.page.folders import append, step, write

TOKEN = "correct-horse-battery"


@contextmanager
def serving(folder: Path, token: str = "") -> Iterator[ThreadingHTTPServer]:
    with serve(RunPages(runs_of(folder)), "127.0.0.1", 0, token) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, and beside their folder what nobody should see."""
    folder = tmp_path_factory.mktemp("watched") / "runs"
    write(folder / "one", 2, 30, width=64)
    write(folder / "two", 2, 20, width=128)
    (folder.parent / "secret.txt").write_text("secret")
    (folder / "one" / "key").write_text("secret")
    return folder


def get(server: ThreadingHTTPServer, path: str, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    """As it is written: no client of ours tidies the path."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    connection.putrequest("GET", path, skip_host=True)
    for name, value in {"Host": f"127.0.0.1:{server.server_address[1]}", **headers}.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def test_the_page_and_its_files_and_nothing_from_elsewhere(folder: Path) -> None:
    with serving(folder) as server:
        answer, body = get(server, "/")
        assert (answer.status, body) == (200, assets.page().encode())
        policy = answer.getheader("Content-Security-Policy") or ""
        assert "default-src 'none'" in policy
        assert "http" not in policy
        for name, kind in assets.TYPES.items():
            answer, body = get(server, f"/assets/{name}")
            assert (answer.status, answer.getheader("Content-Type"), bool(body)) == (200, kind, True)


def test_nothing_outside_is_served(folder: Path) -> None:
    with serving(folder) as server:
        for path in (
            "/../secret.txt", "/assets/../../secret.txt", "/assets/%2e%2e/%2e%2e/secret.txt", "/assets/..%2fassets.py",
            "/secret.txt", "//secret.txt", f"/{folder.parent}/secret.txt", "/one/key", "/one/run.toml",
            "/assets/page.html/..", "/api/run?run=..", "/api/run?run=../runs/one", "/api/charts?run=one/../two",
            "/api/heat?run=/etc", "/api/run", "/api/spans?run=%2e%2e%2fruns", "/api/verdict?run=one%00",
            "/api/nothing?run=one", "/api/../secret.txt",
        ):  # fmt: skip
            answer, body = get(server, path)
            assert answer.status == 404, path
            assert b"secret" not in body.replace(b"secret.txt", b"")


def test_what_leads_out_of_a_runs_folder_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outside = write(tmp_path / "outside", 1, 5, key="secret")
    outside.certificate_path.parent.mkdir()
    outside.certificate_path.write_text('{"steps": 5, "key": "secret"}')
    (outside.path / "proof.json").write_text('{"class": "secret", "results": []}')
    folder = tmp_path / "runs"
    run = write(folder / "one", 1, 5)
    (folder / "away").symlink_to(outside.path)
    (folder / "latest").symlink_to(folder / "one")
    for own, other in (
        (run.settings_path, outside.settings_path),
        (run.path / "proof.json", outside.path / "proof.json"),
    ):
        own.unlink(missing_ok=True)
        own.symlink_to(other)
    (run.path / "final").symlink_to(outside.path / "final")
    run.events_path(7).symlink_to(outside.events_path(0))
    with serving(folder) as server:
        assert {each["name"] for each in json.loads(get(server, "/api/runs")[1])} == {"one"}
        assert get(server, "/api/run?run=away")[0].status == 404
        for what in ("run", "runs", "verdict", "charts"):
            assert b"secret" not in get(server, f"/api/{what}?run=one")[1], what
        assert json.loads(get(server, "/api/run?run=one")[1])["of_ranks"] == 1
    assert "runs/away leads out of" in capsys.readouterr().out


def exchange(server: ThreadingHTTPServer, sent: bytes) -> bytes:
    """Bytes as they are, and all that comes back until the server hangs up."""
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=20) as connection:
        connection.sendall(sent)
        found = b""
        with suppress(ConnectionError):
            while more := connection.recv(65536):
                found += more
        return found


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PATCH", "<b>", "get"])
def test_nothing_but_reading(folder: Path, method: str) -> None:
    with serving(folder) as server:
        answer = exchange(server, f"{method} /api/runs HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 405 ")
    assert b"Allow: GET, HEAD" in head
    assert b"default-src 'none'" in head
    assert body == b"Method Not Allowed\n", "nothing of what was asked is repeated"


def test_what_is_too_much_or_no_request(folder: Path) -> None:
    host = b"Host: localhost\r\n"
    with serving(folder) as server:
        for sent, status in (
            (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n" + host + b"\r\n", b"414"),
            (b"GET / HTTP/1.1\r\n" + host + b"X: " + b"a" * 70_000 + b"\r\n\r\n", b"431"),
            (b"GET / HTTP/1.1\r\n" + host + b"X: 1\r\n" * 200 + b"\r\n", b"431"),
            (b"GET / HTTP/9.9\r\n\r\n", b"Version"),
            (b"nonsense\r\n\r\n", b"Request\n"),
        ):
            answer = exchange(server, sent)
            assert answer.split(b" ", 2)[1] == status, (sent[:40], answer[:100])
            assert b"<" not in answer, "no page of anybody else's making"
        smuggled = b"GET /api/runs HTTP/1.1\r\n" + host + b"\r\n"
        for length in (b"Content-Length: %d\r\n" % len(smuggled), b"Transfer-Encoding: chunked\r\n"):
            answer = exchange(server, b"GET / HTTP/1.1\r\n" + host + length + b"\r\n" + smuggled)
            assert answer.count(b"HTTP/1.1 ") == 1, "a body is no second request"
        assert get(server, "/api/runs")[0].status == 200, "it goes on"


def test_connections_without_a_token_do_not_hold_it_shut(folder: Path) -> None:
    with serving(folder, TOKEN) as server, ExitStack() as held:
        address = ("127.0.0.1", server.server_address[1])
        for _ in range(MOST_CONNECTIONS):
            held.enter_context(socket.create_connection(address, timeout=20)).sendall(b"GET /api/ru")
        began = time.monotonic()
        assert get(server, "/api/runs", Authorization=f"Bearer {TOKEN}")[0].status == 200
        assert time.monotonic() - began < HEAD_SECONDS / 2


def test_one_who_says_nothing_is_let_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.watch.http_server.HEAD_SECONDS", 0.2)
    with serving(folder) as server:
        assert exchange(server, b"GET / HT") == b""


def test_runs_and_their_numbers(folder: Path) -> None:
    with serving(folder) as server:
        runs = json.loads(get(server, "/api/runs")[1])
        assert {run["name"]: run["settings"]["width"] for run in runs} == {"one": "64", "two": "128"}
        charts = json.loads(get(server, "/api/charts?run=two&columns=100")[1])
        assert charts["steps"] == list(range(20))
        assert json.loads(get(server, "/api/run?run=two")[1])["ranks"] == 2
        assert json.loads(get(server, "/api/heat?run=two&phase=forward&first=5&last=10")[1])["columns"] == 5
        odd = json.loads(get(server, "/api/charts?run=two&first=-1&last=99999999999999999999&columns=x")[1])
        assert odd["last"] == 20
        assert get(server, "/api/heat?run=two&first=500&last=2")[0].status == 200
    with serving(folder / "one") as server:
        assert [run["name"] for run in json.loads(get(server, "/api/runs")[1])] == ["one"]
        assert get(server, "/api/run?run=two")[0].status == 404


def test_only_what_is_new_is_sent(tmp_path: Path) -> None:
    run, draw = write(tmp_path / "run", 1, 50), random.Random(0)
    with serving(tmp_path / "run") as server:
        first = json.loads(get(server, "/api/charts?run=run&columns=200")[1])
        append(run, 0, *(step(0, n, draw) for n in range(50, 53)))
        seen: list[int] = []
        while not seen:  # files are looked at again after a moment
            more = json.loads(get(server, f"/api/charts?run=run&columns=200&since={first['version']}&width=1")[1])
            seen = more["steps"]
        assert seen == [50, 51, 52]
        assert len(more["series"]["loss"]["low"]) == 3


def test_a_second_person_sees_the_same(folder: Path) -> None:
    found: list[bytes] = []
    with serving(folder) as server:
        others = [
            threading.Thread(target=lambda: found.append(get(server, "/api/charts?run=one")[1])) for _ in range(8)
        ]
        for thread in others:
            thread.start()
        for thread in others:
            thread.join()
    assert len(set(found)) == 1
    assert len(found) == 8


def test_a_name_that_somebody_else_gave_this_address_is_refused(folder: Path) -> None:
    with serving(folder) as server:
        for host in ("evil.example", "evil.example:80", "localhost.evil.example", "", "[", "127.0.0.1.evil.example"):
            assert get(server, "/api/runs", Host=host)[0].status == 421, host
        for host in ("localhost:1", "127.0.0.1", "[::1]:8347"):
            assert get(server, "/api/runs", Host=host)[0].status == 200, host


def test_a_token_is_asked_for(folder: Path) -> None:
    with serving(folder, TOKEN) as server:
        for path in ("/", "/api/runs", "/assets/page.css", "/?token=wrong", "/?token=", f"/api/runs?token={TOKEN}"):
            assert get(server, path)[0].status == 401, path
        assert get(server, "/", Cookie="phalanx-token=wrong-one")[0].status == 401
        assert get(server, "/", Authorization="Bearer é")[0].status == 401
        answer, _ = get(server, f"/?token={TOKEN}")
        assert (answer.status, answer.getheader("Location")) == (303, "/")
        cookie = answer.getheader("Set-Cookie") or ""
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert get(server, "/api/runs", Cookie=cookie.partition(";")[0])[0].status == 200
        assert get(server, "/api/runs", Authorization=f"Bearer {TOKEN}")[0].status == 200
        assert get(server, "/", Host="evil.example", Cookie=cookie.partition(";")[0])[0].status == 421


def test_beyond_this_machine_only_with_a_token() -> None:
    for host in ("0.0.0.0", "::", "192.168.0.7", "node1"):
        with pytest.raises(WrongUse, match="--token"):
            check(host, 8347, "")
        check(host, 8347, TOKEN)
    for host in ("127.0.0.1", "::1", "localhost", "127.0.0.2"):
        check(host, 8347, "")
    with pytest.raises(WrongUse, match="8 to 200"):
        check("0.0.0.0", 8347, "short")
    with pytest.raises(WrongUse, match="no port"):
        check("127.0.0.1", 70000, "")


def test_a_port_that_is_taken(folder: Path) -> None:
    with serving(folder) as server:
        port = server.server_address[1]
        with pytest.raises(CannotHere, match=f"port {port} is taken. Give another with --port"):
            serve(RunPages(runs_of(folder)), "127.0.0.1", port, "")
    with pytest.raises(CannotHere, match="cannot be listened at"):
        serve(RunPages(runs_of(folder)), "192.0.2.1", 0, TOKEN)
