"""A training job: what to train, how to spread it, where to run it, and how it is kept."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.cluster import Cluster
from phalanx.layout import Layout
from phalanx.task import Task
from phalanx.train.check.beside import Check
from phalanx.train.options import Options


@dataclass(frozen=True)
class Job:
    """Everything resolved and checked, so far as it can be without building the model."""

    reference: str
    """The task as the user named it."""
    task: Task
    layout: Layout
    cluster: Cluster
    options: Options

    def start_check(self) -> Check:
        """The check of the task on one device, begun in a process of its own."""
        return Check(self.task, self.options.init_from is not None, self.options.unchecked)

    def check(self) -> list[str]:
        """Refuse a task that would be refused before its first step; what else there is to say of it, a line each."""
        with self.start_check() as check:
            return check.result().or_refuse().told()
