"""TensorBoard: event files that ``tensorboard --logdir runs`` shows."""

from __future__ import annotations

from typing import Any

from phalanx.watch.loggers.base import LoggedRun, Logger, Numbers

FLUSH_SECONDS = 10


class TensorBoard(Logger):
    """``logs/tensorboard``: scalars under ``train`` and ``held_out``, settings as hyperparameters."""

    title, file = "TensorBoard", "tensorboard"
    package = "tensorboard"
    forgets = True

    def begin(self, run: LoggedRun) -> None:
        """Go on in a file of its own; what others have of later steps is not shown any more."""
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        purge = {"purge_step": run.step + 1} if run.step else {}
        self._writer = SummaryWriter(str(run.folder / self.file), flush_secs=FLUSH_SECONDS, **purge)
        if not run.step:
            rows = "\n".join(f"| {name} | {value} |" for name, value in run.settings.items())
            self._writer.add_text("settings", f"| | |\n|---|---|\n{rows}", 0)
            files: Any = self._writer.file_writer
            for summary in hparams(run.settings, {"train/loss": 0.0}):
                files.add_summary(summary)

    def write(self, step: int, numbers: Numbers) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(f"train/{name}", value, step)

    def write_measures(self, step: int, measures: Numbers) -> None:
        for name, value in measures.items():
            self._writer.add_scalar(f"held_out/{name}", value, step)
        self._writer.flush()

    def end(self, finished: bool) -> None:
        self._writer.close()
