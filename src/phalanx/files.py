"""Small files: written whole, on disk before they have their names, and as soon as a full disk takes them."""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from phalanx import streams

LONGEST_PAUSE = 30.0
"""Seconds between two looks whether there is room on a disk that was full."""


def exists(path: Path) -> bool:
    """Whether it is there; what cannot even be asked for, its name being too long perhaps, is not."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def write_whole(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Write a small file so that whoever reads it, after a power cut too, finds the old content or the new."""
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}.unfinished")  # several hosts may write it at once
    try:
        with open(unfinished, "xb", opener=partial(os.open, mode=mode)) as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)  # it would hold the room that is waited for
        raise
    sync_folder(path.parent)


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


def is_inside(folder: Path, path: Path) -> bool:
    """Whether a file is the folder's own: one that leads elsewhere is not shown to whoever watches."""
    return path.resolve().is_relative_to(folder.resolve())
