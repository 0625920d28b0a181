"""A Prometheus endpoint: the last step's numbers over HTTP, for as long as the run lasts."""

from __future__ import annotations

import math
from pathlib import Path

from phalanx.errors import WrongUse
from phalanx.run import Run
from phalanx.watch.loggers.base import LABELLED, PLAIN, LoggedRun, Logger, Numbers, family
from phalanx.watch.loggers.metrics_server import MetricsServer
from phalanx.words import digits

LOOPBACK = "127.0.0.1"
Samples = dict[str, list[tuple[dict[str, str], float]]]
"""By series, its values with their labels."""


def address_of(text: str) -> tuple[str, int]:
    """``9090``, ``0.0.0.0:9090`` or ``[::1]:9090`` as a host and a port."""
    host, _, port = text.rpartition(":")
    number = digits(port)
    bracketed = host.startswith("[") and host.endswith("]") and len(host) > 2
    if number is None or not 0 < number < 1 << 16 or (set(host) & set("[]:") and not bracketed):
        raise WrongUse(
            f"--metrics-port {text} is no port. Give one from 1 to 65535, such as 9090, 0.0.0.0:9090, or [::1]:9090."
        )
    return host.strip("[]") or LOOPBACK, number


def text_of(host: str, port: int) -> str:
    """An address as a URL has it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Prometheus(Logger):
    """Serves ``/metrics`` on the first rank's host."""

    title = "Prometheus"
    forgets = True

    def __init__(self, port: int, host: str = LOOPBACK) -> None:
        """``host``: the interface to listen at; 0.0.0.0 for all, which other machines reach too."""
        super().__init__()
        self.host, self.port = address_of(text_of(host, port))
        self._samples: Samples = {}
        self._labels: dict[str, str] = {}
        self._page: tuple[Samples, str] = {}, ""
        """The text, and what it was made of: asked for more often than there are steps, it is made once a step."""

    def where(self, run: Run) -> str:
        return f"http://{text_of(self.host, self.port)}/metrics"

    def _folder(self, run: Run | None) -> Path:
        return Path() if run is None else run.path

    def begin(self, run: LoggedRun) -> None:
        self._labels = {"run": run.name}
        self._samples = {"step": [({}, run.step)]}
        self._server = MetricsServer(self.host, self.port, self._told)

    def _told(self) -> str:
        samples = self._samples
        if self._page[0] is not samples:
            self._page = samples, exposition(samples, self._labels)
        return self._page[1]

    def write(self, step: int, numbers: Numbers) -> None:
        found: Samples = {"step": [({}, step)]}
        for name, value in numbers.items():
            series, labels = family(name)
            found.setdefault(series, []).append((labels, value))
        self._samples = {**self._samples, **found}  # in one piece, for whoever reads it now

    def write_measures(self, step: int, measures: Numbers) -> None:
        self._samples = {**self._samples, "held_out": [({"measure": name}, v) for name, v in measures.items()]}

    def end(self, finished: bool) -> None:
        self._server.close()


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
