"""When a run's state is saved, and for how long it is kept."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """When state is kept, and for how long."""

    steps: int = 0
    """A file every so many steps; 0: none by number."""
    minutes: float = 10.0
    """A file every so many minutes; 0: none by time."""
    memory_steps: int = 5
    """A copy in memory every so many steps; 0: none."""
    keep: int = 2
    """So many files are kept, the newest, and the last one that a good step followed;"""
    keep_every: int = 0
    """and besides those of every so many steps."""

    def file_due(self, step: int) -> bool:
        """Whether this step, and no other, goes to a file."""
        return bool(self.steps and step % self.steps == 0)

    def copy_due(self, step: int) -> bool:
        """Whether this step is kept in memory."""
        return bool(self.memory_steps and step % self.memory_steps == 0)

    def time_due(self, seconds: float) -> bool:
        """Whether a file is due so long after the last one."""
        return bool(self.minutes and seconds > 60 * self.minutes)
