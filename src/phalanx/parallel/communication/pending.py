"""A collective on its way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist

Waiting = Callable[[], AbstractContextManager[None]]
"""Gives what is entered while a rank waits for a collective."""


class Pending:
    """A collective on its way; `wait` returns once its result may be used.

    ``finish`` is done at its end, and may give another collective that belongs to it.
    """

    def __init__(
        self,
        works: Sequence[dist.Work] = (),
        finish: Callable[[], Pending | None] | None = None,
        waiting: Waiting = nullcontext,
    ) -> None:
        """``waiting`` says that this rank waits, while it does."""
        self._works, self._finish, self._waiting = works, finish, waiting
        self._following: Pending | None = None

    @property
    def over(self) -> bool:
        """Whether `wait` would return at once."""
        return self._finish is None and self._following is None and all(work.is_completed() for work in self._works)

    def advance(self) -> None:
        """Wait for what is on its way, and launch what follows it, if anything does."""
        works, self._works = self._works, ()
        if works:
            with self._waiting():
                for work in works:
                    work.wait()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._following = finish()

    def wait(self) -> None:
        self.advance()
        if self._following is not None:
            self._following.wait()
            self._following = None
