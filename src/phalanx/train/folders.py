"""The folders of a run: its checkpoints are there, its store is held, and its task's paths mean what they meant."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.checkpoint.shelf import Shelf
from phalanx.checkpoint.store import Store
from phalanx.errors import CannotHere, WrongUse
from phalanx.run import Run


def check_there(run: Run, shelf: Shelf) -> None:
    """Refuse to begin anew where a run's checkpoints were and are not: what they lie on may not be mounted."""
    last = run.last_committed()
    if last is not None and shelf.empty():
        raise CannotHere(
            f"{run.path} has saved checkpoints, up to step {last}, and there is nothing in {shelf.store.url}. Mount or "
            "restore it, or say with --checkpoints where they are now; to begin again, give another --run."
        )


@contextmanager
def held_store(store: Store) -> Iterator[None]:
    """A store held; one that cannot be is refused."""
    try:
        with store.held():
            yield
    except OSError as error:
        if error.filename is None or str(store.url) not in str(error.filename):
            raise
        raise WrongUse(f"{store.url} cannot be written to: {error.strerror}. Give another folder.") from None
