"""The folders of a run: its checkpoints are there, its store is held, and its task's paths mean what they meant."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from phalanx.checkpoint.manager import CheckpointManager
from phalanx.checkpoint.store import Store
from phalanx.errors import CannotHere, WrongUse
from phalanx.events import say
from phalanx.files import exists
from phalanx.run import Run, read_settings
from phalanx.train.choosing import full_reference, to_resume


def taken_up(
    path: Path | None, config: Path | None, task: str | None, resume: bool
) -> tuple[Path | None, Path | None, str | None]:
    """The run to go on with, or the settings to repeat, as seen from the folder that it was started in."""
    if resume:
        path, config = to_resume(path, task, config)
    return where_it_began(path, config, task)


def where_it_began(
    path: Path | None, config: Path | None, task: str | None
) -> tuple[Path | None, Path | None, str | None]:
    """Go to the folder that a run was started in, which its task's relative paths mean; all three as seen from there.

    ``path``: the run to go on with; ``config``: the settings of one to repeat. Where neither has begun, or that folder
    is not there any more, stay.
    """
    known = [settings for settings in (path and Run(path).settings_path, config) if settings and exists(settings)]
    began = read_settings(known[0]).get("run", {}).get("folder") if known else None
    if not isinstance(began, str) or Path(began) == Path.cwd():
        return path, config, task
    if not Path(began).is_dir():
        say(f"   note  the run was started in {began}, which is not there: relative paths are those of {Path.cwd()}")
        return path, config, task
    path, config = path and path.resolve(), config and config.resolve()
    task = None if task is None else full_reference(task)
    os.chdir(began)
    say(f"   note  relative paths of the task are those of {began}, where the run was started")
    return path, config, task


def check_there(run: Run, manager: CheckpointManager) -> None:
    """Refuse to begin anew where a run's checkpoints were and are not: what they lie on may not be mounted."""
    last = run.last_committed()
    if last is not None and manager.empty():
        raise CannotHere(
            f"{run.path} has saved checkpoints, up to step {last}, and there is nothing in {manager.store.url}. Mount "
            "or restore it, or say with --checkpoints where they are now; to begin again, give another --run."
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
