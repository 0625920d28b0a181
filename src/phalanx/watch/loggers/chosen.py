"""The loggers that the command line asks for: ``--log NAME`` and ``--metrics-port``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phalanx.errors import WrongUse, closest
from phalanx.watch.loggers import CSV, Logger, MLflow, OpenTelemetry, Prometheus, TensorBoard, WandB
from phalanx.watch.loggers.prometheus import address_of

NAMES: dict[str, Callable[[], Logger]] = {
    "csv": CSV, "tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow, "opentelemetry": OpenTelemetry,
}  # fmt: skip


def check(names: Sequence[str], metrics_port: str | None) -> None:
    """Refuse a name that is unknown, and a port that is none. Packages are looked for where ranks run."""
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise WrongUse(f"--log {unknown[0]} is no place to log to; {closest(unknown[0], NAMES)}")
    if metrics_port is not None:
        address_of(metrics_port)


def chosen(names: Sequence[str], metrics_port: str | None) -> list[Logger]:
    """One of each; one whose package is not there is refused."""
    check(names, metrics_port)
    found = [NAMES[name]() for name in dict.fromkeys(names)]
    if metrics_port is not None:
        host, port = address_of(metrics_port)
        found.append(Prometheus(port, host))
    return found
