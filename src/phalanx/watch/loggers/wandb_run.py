"""Weights & Biases: one run there for a run here, gone on with after a resume."""

from __future__ import annotations

import os
import uuid

from phalanx.errors import CannotHere
from phalanx.files import write_whole
from phalanx.watch.loggers.base import LoggedRun, Logger, Numbers, kept

RECORDS_NOTHING = {
    "console": "off", "disable_code": True, "disable_git": True, "save_code": False, "x_disable_meta": True,
}  # fmt: skip
"""W&B would send the command line, the program's source and the address of its repository, and passwords in them."""


class WandB(Logger):
    """As ``WANDB_MODE`` and the other variables of W&B's say; its files are in ``logs/wandb``.

    It gets the run's numbers and settings, and records neither command line nor source by itself.
    """

    title, file = "Weights & Biases", "wandb"
    package = "wandb"

    def __init__(self, project: str | None = None, entity: str | None = None, folder: str | None = None) -> None:
        """``project``: by default WANDB_PROJECT, or ``phalanx``."""
        super().__init__(folder)
        self.project, self.entity = project, entity

    def begin(self, run: LoggedRun) -> None:
        import wandb

        self._ended, self._last_step = run.folder / "wandb-steps", run.step
        own = os.environ.get("WANDB_RUN_ID") or kept(run.folder / "wandb-run", lambda: uuid.uuid4().hex[:8])
        project = self.project or os.environ.get("WANDB_PROJECT") or "phalanx"
        try:
            self._run = wandb.init(
                project=project, entity=self.entity, id=own, name=os.environ.get("WANDB_NAME") or run.name,
                resume="allow", dir=str(run.folder), config=run.settings, settings=wandb.Settings(**RECORDS_NOTHING),
            )  # fmt: skip
        except wandb.Error as error:
            told = str(error).splitlines()[0]
            raise CannotHere(
                f"Weights & Biases cannot be reached: {told}. Log in with `wandb login`, or set WANDB_MODE=offline."
            ) from None

    def had(self) -> int:
        """By its server, or what was ended well, offline."""
        if not self._run.offline:
            return max(0, self._run.step - 1)
        return int(self._ended.read_text()) if self._ended.exists() else 0

    def write(self, step: int, numbers: Numbers) -> None:
        self._last_step = step
        self._run.log({f"train/{name}": value for name, value in numbers.items()}, step=step)

    def write_measures(self, step: int, measures: Numbers) -> None:
        self._run.log({f"held_out/{name}": value for name, value in measures.items()}, step=step)

    def end(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)
        write_whole(self._ended, f"{self._last_step}\n")
