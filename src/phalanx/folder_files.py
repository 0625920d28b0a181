"""Files of a folder that others may write to: opened without following links, and read up to a size.

A run's folder may be another user's, or come from elsewhere. Whoever opens its files through here leaves it by no link,
waits for no pipe, touches no device, and reads no more than fits. What is not as it should be is a `BadFile`, whose
message names the file.
"""

from __future__ import annotations

import itertools
import json
import os
import pwd
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from phalanx import streams
from phalanx.errors import WrongUse
from phalanx.words import in_bytes, many, printable

MODE, FOLDER_MODE = 0o640, 0o750
"""What is made in a run's folder is its owner's, and their group may read it."""
MOST_BYTES = 1 << 20
"""Of a file that is read whole, where nothing else is said."""
MOST_NAMES = 1 << 17
"""Of a folder that is listed."""
MOST_NOTES = 30
"""Lines about what is left out, before they are one line that there is more."""
ADVICE = "Remove it, or restore it as the run left it."
KINDS = {
    stat.S_IFLNK: "is a link, which is not followed", stat.S_IFIFO: "is a pipe and not a file",
    stat.S_IFSOCK: "is a socket and not a file", stat.S_IFCHR: "is a device and not a file",
    stat.S_IFBLK: "is a device and not a file", stat.S_IFDIR: "is a folder and not a file",
}  # fmt: skip
_noted: set[str] = set()


class BadFile(WrongUse):
    """A file of a run's folder is not what it should be: a link, a pipe, too large, or something else inside."""

    def __init__(self, path: Path, what: str) -> None:
        """``what``: is wrong with it, as a clause that follows its name."""
        super().__init__(f"{path} {what}. {ADVICE}")
        self.path, self.what = path, what


def open_file(folder: Path, path: Path, flags: int = os.O_RDONLY, mode: int = MODE) -> int:
    """A descriptor of a regular file in a folder, opened as `os.open` does; no link on the way is followed.

    The folder itself may be reached by a link: it is the one that was asked for.
    """
    parent = open_folder(folder, path.parent)
    try:
        _check_kind(path, parent, flags)
        try:
            found = os.open(path.name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=parent)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(parent)
    state = os.fstat(found)
    if not stat.S_ISREG(state.st_mode):  # it has taken the place of what was there a moment ago
        os.close(found)
        raise BadFile(path, "is no regular file")
    if flags & os.O_ACCMODE != os.O_RDONLY and state.st_nlink > 1:
        os.close(found)
        raise BadFile(
            path, f"is one file with {many(state.st_nlink - 1, 'other')} of another name, and is not written to"
        )
    os.set_blocking(found, True)
    return found


def _check_kind(path: Path, parent: int, flags: int) -> None:
    """Refuse what must not even be opened: a device may do something then."""
    try:
        kind = stat.S_IFMT(os.stat(path.name, dir_fd=parent, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        if flags & os.O_CREAT:
            return
        raise FileNotFoundError(2, "No such file or directory", str(path)) from None
    if kind != stat.S_IFREG:
        raise BadFile(path, KINDS.get(kind, "is no regular file"))


def open_folder(folder: Path, path: Path) -> int:
    """A descriptor of a folder inside another, or of that itself; no link between them is followed."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    found, at = os.open(folder, flags), folder
    for part in path.relative_to(folder).parts:
        at /= part
        try:
            inner = os.open(part, flags | os.O_NOFOLLOW, dir_fd=found)
        except OSError as error:
            with suppress(FileNotFoundError):
                kind = stat.S_IFMT(os.stat(part, dir_fd=found, follow_symlinks=False).st_mode)
                if kind == stat.S_IFLNK:
                    raise BadFile(at, KINDS[kind]) from None
                if kind != stat.S_IFDIR:
                    raise BadFile(at, "is no folder") from None
            raise type(error)(error.errno, error.strerror, str(at)) from None
        finally:
            os.close(found)
        found = inner
    return found


def make_folder(folder: Path, path: Path) -> None:
    """Make a folder inside another, with those between them, unless they are there; no link is followed."""
    at = folder
    at.mkdir(parents=True, exist_ok=True)
    for part in path.relative_to(folder).parts:
        parent = open_folder(folder, at)
        try:
            with suppress(FileExistsError):
                os.mkdir(part, FOLDER_MODE, dir_fd=parent)
        finally:
            os.close(parent)
        at /= part
    os.close(open_folder(folder, path))


@contextmanager
def reading(folder: Path, path: Path) -> Iterator[BinaryIO]:
    """A regular file of a folder, to be read piece by piece."""
    with os.fdopen(open_file(folder, path), "rb") as file:
        yield file


@contextmanager
def appending(folder: Path, path: Path, mode: int = MODE) -> Iterator[BinaryIO]:
    """A regular file of a folder, made if it is not there, to be added to."""
    with os.fdopen(open_file(folder, path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode), "ab") as file:
        yield file


@contextmanager
def overwriting(folder: Path, path: Path, mode: int = MODE) -> Iterator[BinaryIO]:
    """A regular file of a folder, made if it is not there, and empty at first."""
    with os.fdopen(open_file(folder, path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode), "w+b") as file:
        yield file


def read_bytes(folder: Path, path: Path, most: int = MOST_BYTES) -> bytes:
    """What a small file of a folder holds; BadFile where that is more than ``most`` bytes."""
    with reading(folder, path) as file:
        found = file.read(most + 1)
        if len(found) > most:
            size = max(len(found), os.fstat(file.fileno()).st_size)
            raise BadFile(path, f"has {in_bytes(size)}, where {in_bytes(most)} is the most that is read")
    return found


def read_text(folder: Path, path: Path, most: int = MOST_BYTES) -> str:
    """The same as text; what is not UTF-8 is replaced."""
    return read_bytes(folder, path, most).decode(errors="replace")


def read_object(folder: Path, path: Path, most: int = MOST_BYTES) -> dict[str, Any]:
    """The JSON object in a small file of a folder."""
    return parsed_object(read_bytes(folder, path, most), path)


def parsed_object(content: bytes, path: Path) -> dict[str, Any]:
    """The JSON object that these bytes are; ``path``: where they come from."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadFile(path, f"is not valid JSON ({_first_line(error)})") from None
    if not isinstance(found, dict):
        raise BadFile(path, f"holds {_kind(found)} where a JSON object is expected")
    return found


def names(folder: Path, path: Path, wanted: Callable[[os.DirEntry[str]], bool] | None = None) -> list[str]:
    """What a folder inside another lists, in order; nothing where it is not there, and no more than `MOST_NAMES`.

    ``wanted``: which of it.
    """
    try:
        parent = open_folder(folder, path)
    except FileNotFoundError:
        return []
    try:
        with os.scandir(parent) as entries:
            found = list(itertools.islice(entries, MOST_NAMES + 1))
            chosen = sorted(each.name for each in found[:MOST_NAMES] if wanted is None or wanted(each))
    finally:
        os.close(parent)
    if len(found) > MOST_NAMES:
        note(f"{path} has more than {many(MOST_NAMES, 'entry', 'entries')}: the others are not looked at")
    return chosen


def is_file(entry: os.DirEntry[str]) -> bool:
    """Whether it is a regular file, and no link."""
    return entry.is_file(follow_symlinks=False)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder, and no link."""
    return entry.is_dir(follow_symlinks=False)


def another_user(path: Path) -> str:
    """Whose a file is, in words, where it is not the caller's; "" where it is, or is not there."""
    try:
        number = os.stat(path, follow_symlinks=False).st_uid
    except OSError:
        return ""
    if number == os.geteuid():
        return ""
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"


def note(line: str) -> None:
    """Say once, on standard error, that something was left out."""
    if line in _noted or len(_noted) > MOST_NOTES:
        return
    _noted.add(line)
    if len(_noted) > MOST_NOTES:
        line = "more is left out, and not told"
    with suppress(OSError):
        print(printable(f"   note  {line}"), file=streams.stderr(), flush=True)


@contextmanager
def left_out() -> Iterator[None]:
    """Go on without a file that is not there, or not as it should be; the latter is said once."""
    try:
        yield
    except FileNotFoundError:
        pass
    except BadFile as bad:
        note(f"{bad.path} {bad.what}: it is left out")
    except OSError as error:
        note(f"{error.filename or 'a file'} cannot be read ({error.strerror}): it is left out")


def count(found: dict[str, Any], name: str, path: Path, most: int = (1 << 53) - 1) -> int:
    """A whole number from 0 to ``most`` in a JSON object that was read from a file."""
    value = found.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise BadFile(path, f"says {name}={_shown(value)}, where a whole number is expected")
    return value


def _shown(value: Any) -> str:
    short = isinstance(value, (bool, int, float)) and abs(value) < 1e18
    return "nothing" if value is None else repr(value) if short else _kind(value)


def _kind(value: Any) -> str:
    kinds = {list: "a list", str: "a text", dict: "an object", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:100]
