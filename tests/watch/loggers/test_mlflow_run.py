"""MLflow, in a database of its own: one run there for all attempts here, read back by its own client."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.watch.loggers.mlflow_run import MLflow
from tests.watch.loggers.runs import STEPS, losses, patiently, trained

pytest.importorskip("mlflow", reason="mlflow is not installed (the dev extra has it)")


def test_each_step_is_in_one_run_once(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    run = trained(tmp_path, "mlflow", phalanx=patiently)
    client = MlflowClient(tracking_uri=f"sqlite:///{run.path / 'logs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("phalanx")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED")
    assert found.data.params["global_batch"] == "8"
    assert "topsecret" not in str(found.data.params)
    assert not any(b"topsecret" in path.read_bytes() for path in run.path.rglob("*") if path.is_file())
    assert {"train/accuracy", "train/some/first x", "train/loss/right", "train/lr"} <= found.data.metrics.keys()
    history = sorted(client.get_metric_history(found.info.run_id, "train/loss"), key=lambda metric: metric.step)
    assert [metric.step for metric in history] == list(range(1, STEPS + 1))
    assert [metric.value for metric in history] == pytest.approx(losses(run), rel=1e-6)
    evaluations = client.get_metric_history(found.info.run_id, "held_out/accuracy")
    assert sorted(metric.step for metric in evaluations) == [5, 10, STEPS]


def test_where_it_goes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from phalanx import Run

    assert MLflow().where(Run(tmp_path)) == str(tmp_path / "logs" / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://there")
    assert MLflow().where(Run(tmp_path)) == "http://there"
