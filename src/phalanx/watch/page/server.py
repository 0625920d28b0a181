"""The page over HTTP, to this machine alone unless a token is given: one page, its files, and answers in JSON."""

from __future__ import annotations

import errno
import hmac
import ipaddress
import re
import socket
from collections.abc import Mapping
from functools import partial
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

from phalanx.errors import CannotHere, WrongUse
from phalanx.watch.http_server import BoundedHandler, BoundedServer
from phalanx.watch.page.answers import NotThere, RunPages

COOKIE = "phalanx-token"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Of every answer: nothing is loaded from elsewhere, and nobody else's page may hold this one."""


class Handler(BoundedHandler):
    """Who may ask, and what they are sent. ``hosts``: names that this server has beside addresses."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "phalanx", ""

    def __init__(self, pages: RunPages, token: str, hosts: frozenset[str], *given: Any) -> None:
        self.pages, self.token, self.hosts = pages, token, hosts
        super().__init__(*given)

    def do_GET(self) -> None:
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # what follows is not read, and is no second request
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
            self._send(HTTPStatus.NOT_FOUND, f"{error}\n".encode(errors="replace"))
        except Exception as error:  # the page says so, and asks again
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
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
        self.send_response_only(status)
        for name, value in {**HEADERS, **headers, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What is no request for a page: another method, a line that is too long or makes no sense."""
        self.close_connection = True
        only = code == HTTPStatus.NOT_IMPLEMENTED
        status = HTTPStatus.METHOD_NOT_ALLOWED if only else HTTPStatus(code)
        self._send(status, f"{status.phrase}\n".encode(), headers={"Allow": "GET, HEAD"} if only else {})


def _same(given: str, right: str) -> bool:
    """In a time that does not tell how much of it is right."""
    return hmac.compare_digest(given.encode(), right.encode())


def serve(pages: RunPages, host: str, port: int, token: str) -> BoundedServer:
    """A server that listens, and answers as soon as its ``serve_forever`` is called."""
    check(host, port, token)
    named = {"localhost", socket.gethostname().lower(), socket.getfqdn().lower(), host.lower()}
    try:
        return BoundedServer((host, port), partial(Handler, pages, token, frozenset(named)))
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
