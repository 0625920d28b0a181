"""Small files: written whole, on disk before they have their names, and as soon as a full disk takes them.

What is made here is its owner's, and their group may read it, less what the umask takes away.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from phalanx import streams
from phalanx.folder_files import FOLDER_MODE, MODE, open_folder

EVERYBODYS = 0o666
"""Of a file that is made to be shared, such as a data set."""
LONGEST_PAUSE = 30.0
"""Seconds between two looks whether there is room on a disk that was full."""


def exists(path: Path) -> bool:
    """Whether it is there; what cannot even be asked for, its name being too long perhaps, is not."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def opened(path: Path, mode: str) -> IO[Any]:
    """Open a file; one that is made now is for its owner and their group."""
    return open(path, mode, encoding=None if "b" in mode else "utf-8", opener=partial(os.open, mode=MODE))


def make_folders(path: Path) -> None:
    """Make a folder, and those above it that are missing, for its owner and their group."""
    for each in (*reversed(path.parents), path):
        if not each.is_dir():
            each.mkdir(FOLDER_MODE, exist_ok=True)


@contextmanager
def restricted() -> Iterator[None]:
    """Meanwhile what others' code makes in this process, or in one that it starts, has such modes too."""
    before = os.umask(0o077)
    os.umask(before | 0o777 & ~FOLDER_MODE)
    try:
        yield
    finally:
        os.umask(before)


def write_whole(path: Path, content: str | bytes, mode: int = MODE, within: Path | None = None) -> None:
    """Write a small file so that whoever reads it, after a power cut too, finds the old content or the new.

    ``within``: the folder that it is in, below which no link is followed.
    """
    unfinished = f"{path.name}.{secrets.token_hex(4)}.unfinished"  # several hosts may write it at once
    folder = open_folder(within or path.parent, path.parent)
    try:
        try:
            handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=folder)
            with open(handle, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(unfinished, dir_fd=folder)  # it would hold the room that is waited for
            raise
        os.fsync(folder)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(folder)


def json_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds; ValueError for anything else, OSError for what cannot be read."""
    try:
        found = json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__}, and no object")
    return found


def content(path: Path) -> tuple[bytes, int] | None:
    """What a file holds, and its mode; None if it is not there."""
    return (path.read_bytes(), path.stat().st_mode & 0o777) if path.exists() else None


def put_back(files: Mapping[Path, tuple[bytes, int] | None]) -> None:
    """Have files be as `content` found them."""
    for path, known in files.items():
        if known is None:
            path.unlink(missing_ok=True)
        else:
            write_whole(path, *known)


def sync_folder(folder: Path) -> None:
    """What a folder lists, on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def no_room(error: BaseException | None) -> bool:
    """Whether a disk is full, or a quota."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def pauses() -> Iterator[float]:
    """Seconds to wait before each next look whether there is room."""
    return (min(LONGEST_PAUSE, 0.25 * 2**attempt) for attempt in itertools.count())


def when_there_is_room(path: Path, write: Callable[[], None]) -> None:
    """Write what the run cannot go on without, as soon as the disk takes it."""
    for attempt, pause in enumerate(pauses()):
        try:
            write()
        except OSError as error:
            if not no_room(error):
                raise
            if not attempt:
                print(f"   note  {path} cannot be written: {error.strerror}; waiting for room", file=streams.stderr())
            time.sleep(pause)
            continue
        if attempt:
            print(f"   note  {path} could be written at last", file=streams.stderr())
        return
