"""Loggers: where a run's numbers are written beside its events. ``--log NAME``, or one of `Task.callbacks`."""

from phalanx.watch.loggers.base import Logger
from phalanx.watch.loggers.csv_file import CSV
from phalanx.watch.loggers.mlflow_run import MLflow
from phalanx.watch.loggers.opentelemetry_meter import OpenTelemetry
from phalanx.watch.loggers.prometheus import Prometheus
from phalanx.watch.loggers.tensorboard_files import TensorBoard
from phalanx.watch.loggers.wandb_run import WandB

__all__ = ["CSV", "Logger", "MLflow", "OpenTelemetry", "Prometheus", "TensorBoard", "WandB"]
