"""A folder that nobody but this user can put code into: whatever is loaded from elsewhere may be anybody's.

Root is trusted, as it is everywhere. A folder that others may write to, or that another user owns, is not, nor is one
below it; but for a folder like /tmp, where nobody can rename what belongs to others.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path


def others_in(path: Path) -> str:
    """Why others could put code into a folder or a file, in words; "": they cannot."""
    innermost = Path(os.path.realpath(path))
    for each in (innermost, *innermost.parents):
        try:
            found = os.lstat(each)
        except OSError as error:
            return f"{each}: {error.strerror}"
        if found.st_uid not in (0, os.geteuid()):
            return f"{each} belongs to another user (number {found.st_uid})"
        open_ = found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _alone(found.st_gid))
        if open_ and (each == innermost or not found.st_mode & stat.S_ISVTX):
            return f"{each} can be written to by others (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


@cache
def _alone(group: int) -> bool:
    """Whether a group is this user's own, as many systems give everybody one."""
    if group == 0:
        return True
    with suppress(KeyError):
        me, known = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
        return known.gr_name == me.pw_name and set(known.gr_mem) <= {me.pw_name}
    return False


def own_folder(wanted: Path, name: str) -> Path:
    """A folder of that name in the one that is wanted, or where nobody else can write, which a warning says.

    `RuntimeError`: there is none.
    """
    why = ""
    for root in (wanted, *_others_wanted()):
        refused = _made(root / name)
        if not refused:
            if root != wanted:
                _warn(f"compiled code is kept in {root}: {why}, who could plant code there")
            return Path(os.path.realpath(root / name))
        why = why or refused
    raise RuntimeError(f"no folder for it is this user's alone: {why}")


@cache
def _warn(text: str) -> None:
    """Once."""
    warnings.warn(text, stacklevel=4)


def _others_wanted() -> Iterator[Path]:
    """Where it may be instead."""
    with suppress(RuntimeError):  # a user without a home, as in some containers
        yield Path.home() / ".cache" / "phalanx" / "compiled"
    yield Path(tempfile.gettempdir()) / f"phalanx-{os.geteuid()}"


def _made(folder: Path) -> str:
    """Make it, for this user alone, if it is not there; why it cannot be used."""
    try:
        for each in (*reversed(folder.parents), folder):
            if not each.is_dir():
                each.mkdir(0o700, exist_ok=True)
        return others_in(folder)
    except (OSError, ValueError) as error:
        return f"{folder}: {getattr(error, 'strerror', None) or error}"


def keep_to_own(folders: Mapping[str, str]) -> None:
    """Have compilers of others keep their code where nobody else can write. ``folders``: by variable, the usual one."""
    for variable, usual in folders.items():
        wanted = Path(os.environ.get(variable) or usual)
        known = own_folder(wanted.parent, wanted.name)
        if str(known) != os.path.abspath(wanted):  # a link may lead elsewhere later
            os.environ[variable] = str(known)
