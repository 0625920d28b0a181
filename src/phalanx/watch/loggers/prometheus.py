"""A Prometheus endpoint: the last step's numbers over HTTP, for as long as the run lasts."""

from __future__ import annotations

import errno
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from phalanx.errors import CannotHere, WrongUse
from phalanx.run import Run
from phalanx.watch.loggers.base import LABELLED, PLAIN, LoggedRun, Logger, Numbers, family
from phalanx.words import digits

LOOPBACK = "127.0.0.1"
TAKEN_SECONDS = 5.0
"""How long a port may be held by a rank that was killed."""
KIND = "text/plain; version=0.0.4; charset=utf-8"
Samples = dict[str, list[tuple[dict[str, str], float]]]
"""By series, its values with their labels."""


def address_of(text: str) -> tuple[str, int]:
    """``9090`` or ``0.0.0.0:9090`` as a host and a port."""
    host, _, port = text.rpartition(":")
    number = digits(port)
    if number is None or not 0 < number < 1 << 16:
        raise WrongUse(f"--metrics-port {text} is no port. Give one from 1 to 65535, such as 9090, or 0.0.0.0:9090.")
    return host or LOOPBACK, number


class Prometheus(Logger):
    """Serves ``/metrics`` on the first rank's host."""

    title = "Prometheus"
    forgets = True

    def __init__(self, port: int, host: str = LOOPBACK) -> None:
        """``host``: the interface to listen at; 0.0.0.0 for all, which other machines reach too."""
        super().__init__()
        self.host, self.port = address_of(f"{host}:{port}")
        self._samples: Samples = {}
        self._labels: dict[str, str] = {}

    def where(self, run: Run) -> str:
        return f"http://{self.host}:{self.port}/metrics"

    def _folder(self, run: Run | None) -> Path:
        return Path() if run is None else run.path

    def begin(self, run: LoggedRun) -> None:
        self._labels = {"run": run.name}
        self._samples = {"step": [({}, run.step)]}
        self._server = _bound(self.host, self.port, lambda: exposition(self._samples, self._labels))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name="metrics", daemon=True)
        self._thread.start()

    def write(self, step: int, numbers: Numbers) -> None:
        found: Samples = {"step": [({}, step)]}
        for name, value in numbers.items():
            series, labels = family(name)
            found.setdefault(series, []).append((labels, value))
        self._samples = {**self._samples, **found}  # in one piece, for whoever reads it now

    def write_measures(self, step: int, measures: Numbers) -> None:
        self._samples = {**self._samples, "held_out": [({"measure": name}, v) for name, v in measures.items()]}

    def end(self, finished: bool) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def exposition(samples: Samples, common: dict[str, str]) -> str:
    """Prometheus' text format."""
    known = {"step": "how many steps are done", **PLAIN, **LABELLED}
    lines = []
    for series, help_text in known.items():
        if series in samples:
            lines += [f"# HELP phalanx_{series} {help_text}", f"# TYPE phalanx_{series} gauge"]
            lines += [f"phalanx_{series}{{{_labels({**common, **own})}}} {_number(v)}" for own, v in samples[series]]
    return "".join(f"{line}\n" for line in lines)


def _number(value: float) -> str:
    return repr(float(value)) if math.isfinite(value) else {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}[str(value)]


def _labels(labels: dict[str, str]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _bound(host: str, port: int, text: Any) -> ThreadingHTTPServer:
    """A server at this address; one that is taken is refused, if it stays so."""

    class MetricsHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path.partition("?")[0] in ("/metrics", "/")
            body = (text() if known else "Look at /metrics.\n").encode()
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", KIND)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """No line for each request."""

    deadline = time.monotonic() + TAKEN_SECONDS
    while True:
        try:
            return ThreadingHTTPServer((host, port), MetricsHandler)
        except OSError as error:
            if time.monotonic() > deadline or error.errno != errno.EADDRINUSE:
                raise CannotHere(
                    f"{host}:{port} cannot be listened at for Prometheus: {error.strerror or error}. Choose another "
                    "--metrics-port, or end what holds it."
                ) from None
            time.sleep(0.2)
