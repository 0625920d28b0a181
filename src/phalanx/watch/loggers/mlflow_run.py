"""MLflow: one run there for a run here, gone on with after a resume."""

from __future__ import annotations

import os
import re
import time
from typing import Any

from phalanx.errors import CannotHere
from phalanx.run import Run
from phalanx.watch.loggers.base import LoggedRun, Logger, Numbers, kept

SEND_SECONDS = 5.0
"""What is to be logged waits so long for more, since each message takes a server's time."""
MOST = 800
"""So many numbers are sent at once; MLflow takes 1000."""
LONGEST_PARAMETER = 6000


class MLflow(Logger):
    """At ``MLFLOW_TRACKING_URI``, or in a database of its own, ``logs/mlflow.db``."""

    title, file = "MLflow", "mlflow.db"
    package = "mlflow"

    def __init__(
        self, experiment: str | None = None, tracking_uri: str | None = None, folder: str | None = None
    ) -> None:
        """``experiment``: by default MLFLOW_EXPERIMENT_NAME, or ``phalanx``."""
        super().__init__(folder)
        self.experiment, self.tracking_uri = experiment, tracking_uri
        self._waiting: list[Any] = []
        self._sent: Any = None

    def where(self, run: Run) -> str:
        return self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or super().where(run)

    def begin(self, run: LoggedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        where = self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        where = where or f"sqlite:///{(run.folder / self.file).resolve()}"
        try:
            self._client = MlflowClient(tracking_uri=where)
            self._id = kept(run.folder / "mlflow-run", lambda: self._created(run.name))
            self._client.update_run(self._id, status="RUNNING")
            if not run.step:
                parameters = [Param(_key(n), str(v)[:LONGEST_PARAMETER]) for n, v in run.settings.items()]
                self._client.log_batch(self._id, params=parameters)
        except MlflowException as error:
            told = str(error).strip().splitlines()[0]
            raise CannotHere(
                f"MLflow cannot log to {where}: {told} Set MLFLOW_TRACKING_URI to a server or a database that is there "
                "(a database needs pip install sqlalchemy alembic)."
            ) from None
        self._sent_at = time.monotonic()

    def had(self) -> int:
        return max((metric.step for metric in self._client.get_metric_history(self._id, "train/lr")), default=0)

    def _created(self, name: str) -> str:
        experiment = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "phalanx"
        known = self._client.get_experiment_by_name(experiment)
        number = known.experiment_id if known is not None else self._client.create_experiment(experiment)
        return self._client.create_run(number, run_name=name).info.run_id

    def write(self, step: int, numbers: Numbers) -> None:
        self._log("train", step, numbers)

    def write_measures(self, step: int, measures: Numbers) -> None:
        self._log("held_out", step, measures)

    def _log(self, of: str, step: int, numbers: Numbers) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._waiting += [Metric(f"{of}/{_key(name)}", value, now, step) for name, value in numbers.items()]
        if len(self._waiting) >= MOST or time.monotonic() - self._sent_at > SEND_SECONDS:
            self._send()

    def _send(self) -> None:
        """In a thread of MLflow's, one batch after another."""
        for begin in range(0, len(self._waiting), MOST):
            if self._sent is not None:
                self._sent.wait()  # for long done, or MLflow is gone, and that is to be said
            batch = self._waiting[begin : begin + MOST]
            self._sent = self._client.log_batch(self._id, metrics=batch, synchronous=False)
        self._waiting, self._sent_at = [], time.monotonic()

    def end(self, finished: bool) -> None:
        self._send()
        if self._sent is not None:
            self._sent.wait()
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")


def _key(name: str) -> str:
    """A name that MLflow takes."""
    return re.sub(r"[^/\w.\- ]", "_", name)
