"""The page over HTTP, to this machine alone unless a token is given: one page, its files, and answers in JSON."""

from __future__ import annotations

import errno
import hmac
import ipaddress
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.pool import Pool
from typing import Any
from urllib.parse import parse_qs, urlsplit

from phalanx.errors import CannotHere, WrongUse
from phalanx.run import Run
from phalanx.watch.page import assets, story, views
from phalanx.watch.page.reading import EventFile, helpers, read_on
from phalanx.watch.page.table import RunTable

COOKIE = "phalanx-token"
LOOK_SECONDS = 0.5
"""Files are looked at again no sooner, however many watch."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Of every answer: nothing is loaded from elsewhere, and nobody else's page may hold this one."""


class NotThere(LookupError):
    """Nothing has this address."""


@dataclass
class Watched:
    """A run that somebody looks at: its events as columns, read on when they are asked for."""

    table: RunTable
    lock: threading.Lock = field(default_factory=threading.Lock)
    looked: float = -LOOK_SECONDS
    verdict: tuple[float, dict[str, Any]] = (0.0, {})
    """Until when it is taken to be true, and what it is."""
    opening: threading.Thread | None = None
    """What reads it for the first time, where that takes a while."""

    def open(self, pool: Pool, files: list[EventFile]) -> None:
        """Take in what others read, rank by rank: whoever looks meanwhile sees those that are there."""
        with pool:
            for new in pool.imap(partial(read_on, self.table.run), files):
                with self.lock:
                    self.table.take([new])

    @property
    def is_opening(self) -> bool:
        return self.opening is not None and self.opening.is_alive()

    def refreshed(self) -> RunTable:
        if self.is_opening:
            return self.table
        if time.monotonic() - self.looked >= LOOK_SECONDS:
            self.table.refresh()
            self.looked = time.monotonic()
        return self.table

    def concluded(self) -> dict[str, Any]:
        """Asked for anew after ten times as long as it took to find, and after 3 s at least."""
        began = time.monotonic()
        if began >= self.verdict[0]:
            found = story.verdict(self.table.run, self.table)
            now = time.monotonic()
            self.verdict = now + max(3.0, 10 * (now - began)), found
        return self.verdict[1]


class RunPages:
    """What is answered: ``runs`` lists those that may be seen, by name; nothing else of the disk can be named."""

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
            return json.dumps(self._json(path.removeprefix("/api/"), query)).encode(), "application/json"
        raise NotThere(path)

    def _json(self, what: str, query: Mapping[str, str]) -> Any:
        if what == "runs":
            return [story.brief(run) for run in self.runs().values()]
        if what not in ("run", "charts", "heat", "spans", "verdict"):
            raise NotThere(what)
        numbers = {name: int(text) for name, text in query.items() if re.fullmatch(r"\d{1,12}", text)}
        watched = self._run(query.get("run", ""))
        with watched.lock:
            table = watched.refreshed()
            if what == "run":
                return story.facts(table.run, table) | {"reading": watched.is_opening}
            if what == "verdict":
                return watched.concluded()
            window = views.Window.of(table, numbers)
            if what == "charts":
                return views.charts(table, window, numbers.get("since"), numbers.get("width", 0))
            if what == "heat":
                return views.heat(table, window, query.get("phase", "total"))
            return views.spans(table, window)

    def _run(self, name: str) -> Watched:
        run = self.runs().get(name)
        if run is None:
            raise NotThere(f"no run {name!r} is watched here")
        with self._lock:
            return self._watched.setdefault(name, Watched(RunTable(run)))


class Handler(BaseHTTPRequestHandler):
    """Who may ask, and what they are sent. ``hosts``: names that this server has beside addresses."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "phalanx", ""
    timeout = 60

    def __init__(self, pages: RunPages, token: str, hosts: frozenset[str], *given: Any) -> None:
        self.pages, self.token, self.hosts = pages, token, hosts
        super().__init__(*given)

    def do_GET(self) -> None:
        if not self._is_meant():
            self._send(HTTPStatus.MISDIRECTED_REQUEST, b"this server is not called by that name\n")
            return
        path, _, words = self.path.partition("?")
        query = {name: values[-1] for name, values in parse_qs(words).items()}
        if self.token and path == "/" and _same(query.get("token", ""), self.token):
            cookie = f"{COOKIE}={self.token}; HttpOnly; SameSite=Strict; Path=/"
            self._send(HTTPStatus.SEE_OTHER, b"", headers={"Location": "/", "Set-Cookie": cookie})
            return
        if self.token and not _same(self._shown_token(), self.token):
            self._send(HTTPStatus.UNAUTHORIZED, b"open this page with ?token=..., as phalanx watch was given\n")
            return
        try:
            body, kind = self.pages.answer(path, query)
        except NotThere as error:
            self._send(HTTPStatus.NOT_FOUND, f"{error}\n".encode())
        except Exception as error:  # the page says so, and asks again
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}\n".encode())
        else:
            self._send(HTTPStatus.OK, body, kind)

    do_HEAD = do_GET

    def _is_meant(self) -> bool:
        """A page of somebody else's whose name leads here since a moment ago would ask under that name."""
        try:
            name = (urlsplit(f"//{self.headers.get('Host', '')}").hostname or "").lower()
            return name in self.hosts or bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    def _shown_token(self) -> str:
        authorization = self.headers.get("Authorization", "")
        if authorization.startswith("Bearer "):
            return authorization.removeprefix("Bearer ")
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(COOKIE)
        except CookieError:
            return ""
        return cookie.value if cookie else ""

    def _send(
        self, status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8", headers: Mapping[str, str] = {}
    ) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, **headers, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *words: Any) -> None:
        """Nothing: whoever watches looks at the page."""

    def handle(self) -> None:
        with suppress(ConnectionError, TimeoutError):  # a browser that went away
            super().handle()


def _same(given: str, right: str) -> bool:
    """In a time that does not tell how much of it is right."""
    return hmac.compare_digest(given.encode(), right.encode())


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, family: socket.AddressFamily, *given: Any) -> None:
        self.address_family = family
        super().__init__(*given)


def serve(pages: RunPages, host: str, port: int, token: str) -> ThreadingHTTPServer:
    """A server that listens, and answers as soon as its ``serve_forever`` is called."""
    check(host, port, token)
    named = {"localhost", socket.gethostname().lower(), socket.getfqdn().lower(), host.lower()}
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return _Server(family, (host, port), partial(Handler, pages, token, frozenset(named)))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CannotHere(f"port {port} is taken. Give another with --port, or --port 0 for any.") from None
        raise CannotHere(
            f"{host}:{port} cannot be listened at: {error.strerror}. Give another --host or --port."
        ) from None


def check(host: str, port: int, token: str) -> None:
    """Refuse to show a run to a network where anybody could look."""
    if not 0 <= port <= 65535:
        raise WrongUse(f"--port {port} is no port. Give one from 0 to 65535; 0 takes any that is free.")
    if token and not re.fullmatch(r"[A-Za-z0-9._~-]{8,200}", token):
        raise WrongUse("--token must be 8 to 200 letters, digits, '.', '_', '~' or '-'. Give another.")
    if not token and not is_local(host):
        raise WrongUse(
            f"--host {host} would show the run to everybody who reaches this machine. Give a --token that they must "
            "know, or leave --host out and forward the port over ssh."
        )


def is_local(host: str) -> bool:
    """Whether only this machine can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
