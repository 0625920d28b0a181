"""Whose code a run's ``run.toml`` names: that of somebody else runs only where the caller says so.

Training, evaluating and most of exporting import the task of a run, which runs its file as the caller. In one's own run
it is what one has trained before. In a folder of another user's, whoever may write to it chooses what is run.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx import streams
from phalanx.errors import WrongUse
from phalanx.events import say
from phalanx.references import RECIPES, find_task
from phalanx.task import Task


def task_of(settings: Path, ran: Mapping[str, Any], trust: bool, advice: str = "") -> type[Task]:
    """The class of the task that a ``run.toml`` names; ``ran``: what it says of its run.

    Where both the ``run.toml`` and the code are another user's, it is refused but with ``trust``; a line says whose
    code is run where it is another user's. ``advice``: what does without the code.
    """
    reference, folder = str(ran["task"]), ran.get("folder")
    code = next((path for path in imported_from(reference, folder) if owner(path)), None)
    theirs = "" if code is None else owner(code)
    if theirs and owner(settings) and not trust:
        raise WrongUse(
            f"{settings} belongs to {owner(settings)} and names {code}, which belongs to {theirs}: it would be run as "
            f"you. Look at it, and give --trust to run it{advice}."
        )
    if theirs:
        say(f"   note  runs {code}, which belongs to {theirs}", streams.stderr())
    return find_task(reference, folder)


def imported_from(reference: str, folder: Any) -> list[Path]:
    """Where code comes from that a task's word names: its file, and the folder where its imports are looked for."""
    if reference in RECIPES:
        return []
    code, word = file_of(reference, folder), reference.partition(":")[0]
    beside = Path(word).parent if word.endswith(".py") else Path(folder) if isinstance(folder, str) else None
    return [path for path in (code, beside) if path is not None]


def file_of(reference: str, folder: Any) -> Path | None:
    """The file whose code a task's word names; None for a recipe of ours, and for what is installed."""
    word = reference.partition(":")[0]
    if reference in RECIPES:
        return None
    if word.endswith(".py"):
        return Path(word)
    first = Path(folder if isinstance(folder, str) else ".") / word.partition(".")[0]
    return next((path for path in (first.with_name(f"{first.name}.py"), first) if path.exists()), None)


def owner(path: Path) -> str:
    """Whose a file is, where that is neither the caller nor root; else nothing."""
    try:
        number = path.stat().st_uid
    except OSError:
        return ""  # it is told where it is read
    if number in (os.geteuid(), 0):
        return ""
    try:
        return f"the user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"the user of number {number}"
