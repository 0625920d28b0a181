"""A collective on its way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist


class Pending:
    """A collective on its way; `wait` returns once its result may be used.

    ``finish`` is done at its end, and may give another collective that belongs to it.
    """

    __slots__ = ("_finish", "_following", "_waiting", "_works")

    def __init__(
        self,
        works: Sequence[dist.Work] = (),
        finish: Callable[[], Pending | None] | None = None,
        waiting: AbstractContextManager[None] = nullcontext(),  # noqa: B008 - it has no state
    ) -> None:
        """``waiting`` is entered while this rank waits."""
        self._works, self._finish, self._waiting = works, finish, waiting
        self._following: Pending | None = None

    @property
    def over(self) -> bool:
        """Whether `wait` would return at once."""
        return self._finish is None and self._following is None and all(work.is_completed() for work in self._works)

    def advance(self) -> None:
        """Wait for what is on its way, and launch what follows it, if anything does."""
        works = self._works
        if works:
            self._works = ()
            with self._waiting:
                for work in works:
                    work.wait()
        finish = self._finish
        if finish is not None:
            self._finish = None
            self._following = finish()

    def then(self, last: Callable[[], None]) -> Pending:
        """The same, and something that is done when all of it is there."""

        def end() -> None:
            self.wait()
            last()

        def launch() -> Pending:
            self.advance()
            return Pending((), end)

        return Pending((), launch)

    def wait(self) -> None:
        self.advance()
        following = self._following
        if following is not None:
            following.wait()
            self._following = None
