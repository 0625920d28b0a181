"""OpenTelemetry: what its own reader sees, and what is sent over OTLP."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from phalanx.watch.loggers import OpenTelemetry
from phalanx.watch.loggers.base import LoggedRun
from tests.test_cli import phalanx
from tests.watch.loggers.runs import TASK

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry.sdk is not installed (the dev extra has it)")


def test_gauges_have_the_last_numbers() -> None:
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    made = OpenTelemetry(lambda: reader)
    made.begin(LoggedRun("mine", Path(), {"global_batch": 8}, 0))
    for step in (1, 2):
        made.write(step, {"loss": 1.0 / step, "loss/a": 0.25, "accuracy": 0.5, "seconds/forward": 0.1, "lr": 1e-3})
    made.write_measures(2, {"f1": 0.75})
    data = reader.get_metrics_data()
    assert data is not None
    (found,) = data.resource_metrics
    assert found.resource.attributes["phalanx.run"] == "mine"
    assert found.resource.attributes["phalanx.setting.global_batch"] == 8
    told = {
        (metric.name, *dict(point.attributes).values()): point.value
        for scope in found.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }
    assert told == {
        ("phalanx.step",): 2,
        ("phalanx.loss",): 0.5,
        ("phalanx.loss_part", "a"): 0.25,
        ("phalanx.logged", "accuracy"): 0.5,
        ("phalanx.seconds", "forward"): 0.1,
        ("phalanx.lr",): 1e-3,
        ("phalanx.held_out", "f1"): 0.75,
    }
    made.end(True)


def test_the_command_line_is_no_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    monkeypatch.setenv("OTEL_EXPERIMENTAL_RESOURCE_DETECTORS", "process")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=vision,api_key=swordfish")
    monkeypatch.setattr("sys.argv", ["phalanx", "train", "--set", "password=swordfish"])
    reader = InMemoryMetricReader()
    made = OpenTelemetry(lambda: reader)
    made.begin(LoggedRun("mine", Path(), {}, 0))
    made.write(1, {"loss": 1.0})
    data = reader.get_metrics_data()
    assert data is not None
    found = dict(data.resource_metrics[0].resource.attributes)
    assert found["team"] == "vision"
    assert "process.pid" in found
    assert "swordfish" not in str(found)
    made.end(True)


def test_a_run_sends_them_over_otlp(tmp_path: Path) -> None:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    got: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = ExportMetricsServiceRequest()
            request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
            got.append(request)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        settings = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        }
        (tmp_path / "task.py").write_text(TASK.format(more=f"import os\nos.environ |= {settings}", methods=""))
        done = phalanx("train", "task.py", "--log", "opentelemetry", "--steps", "3", "--run", "run", cwd=tmp_path)
        server.shutdown()
        thread.join()
    assert done.returncode == 0, done.stderr
    metrics = {
        metric.name: metric.gauge.data_points[-1].as_double or metric.gauge.data_points[-1].as_int
        for request in got
        for resource in request.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert metrics["phalanx.step"] == 3
    assert 0 < metrics["phalanx.loss"] < 10
    assert "phalanx.logged" in metrics
