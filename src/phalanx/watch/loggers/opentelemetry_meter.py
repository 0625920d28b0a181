"""OpenTelemetry: gauges that are exported over OTLP, as its variables say, or to a reader that is given."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import Any

from phalanx.errors import WrongUse
from phalanx.redact import redact_field
from phalanx.run import Run
from phalanx.watch.loggers.base import LABELLED, PLAIN, LoggedRun, Logger, Numbers, family


class OpenTelemetry(Logger):
    """Gauges ``phalanx.loss``, ``phalanx.lr`` and so on, to ``OTEL_EXPORTER_OTLP_ENDPOINT``."""

    title = "OpenTelemetry"
    forgets = True
    package = "opentelemetry"
    installs = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"

    def __init__(self, reader: Callable[[], Any] | None = None, folder: str | None = None) -> None:
        """``reader``: makes a metric reader of the SDK's, on the first rank; by default one that exports over OTLP."""
        super().__init__(folder)
        self._reader = reader or _over_otlp
        if importlib.util.find_spec("opentelemetry.sdk") is None or (reader is None and not _has_otlp()):
            raise WrongUse(f"{self.title} needs packages that are not there. pip install {self.installs}")

    def where(self, run: Run) -> str:
        return os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or "OTLP"

    def begin(self, run: LoggedRun) -> None:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.resources import Resource

        told = {f"phalanx.setting.{name}": value for name, value in run.settings.items()}
        found = Resource.create({"service.name": "phalanx", "phalanx.run": run.name, **told})
        self._provider = MeterProvider([self._reader()], Resource(_shown(found.attributes), found.schema_url))
        meter = self._provider.get_meter("phalanx")
        known = {"step": "how many steps are done", **PLAIN, **LABELLED}
        self._gauges = {name: meter.create_gauge(f"phalanx.{name}", description=text) for name, text in known.items()}

    def write(self, step: int, numbers: Numbers) -> None:
        self._gauges["step"].set(step)
        for name, value in numbers.items():
            series, labels = family(name)
            self._gauges[series].set(value, labels)

    def write_measures(self, step: int, measures: Numbers) -> None:
        for name, value in measures.items():
            self._gauges["held_out"].set(value, {"measure": name})

    def end(self, finished: bool) -> None:
        self._provider.shutdown()


def _shown(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Without secrets, nor the command line, which the SDK's detector of processes adds where it is asked for."""
    own = {name: value for name, value in attributes.items() if not name.startswith("process.command")}
    return {name: redact_field(name.rpartition(".")[2], value) for name, value in own.items()}


def _has_otlp() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


def _over_otlp() -> Any:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    return PeriodicExportingMetricReader(OTLPMetricExporter())
