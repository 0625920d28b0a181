"""Where checkpoints are kept: a folder on disk, or anything that fsspec has a URL for.

On disk a folder appears by its rename, all at once or not at all. Other stores have no such rename, but the better ones
create an object only if it is not there: `checkpoint.commits` makes do with that.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import fsspec

from phalanx.errors import WrongUse
from phalanx.files import make_folders, opened, sync_folder
from phalanx.folder_files import FOLDER_MODE
from phalanx.redact import redact
from phalanx.run import held

CONDITIONAL = ("s3", "s3a", "memory")
"""Stores that were seen to create an object only if nobody else has."""


class Store(ABC):
    """Files by name under one root."""

    url: str

    @abstractmethod
    def names(self, folder: str = "") -> list[str]:
        """What lies directly in a folder; nothing if it is not there."""

    @abstractmethod
    def make(self, folder: str) -> None:
        """Make a folder, if it is not there."""

    @abstractmethod
    def write(self, name: str) -> AbstractContextManager[BinaryIO]:
        """A new file, kept when the context ends."""

    @abstractmethod
    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Some bytes of a file; OSError if it is not there."""

    @abstractmethod
    def size(self, name: str) -> int: ...

    @abstractmethod
    def remove(self, folder: str) -> None:
        """Take a folder away, so that it is at no moment half a checkpoint."""

    @abstractmethod
    def rename(self, folder: str, name: str) -> None:
        """Give a folder another name."""

    @abstractmethod
    def there(self, name: str) -> bool:
        """Whether a file is there by now; cheap, as it is asked again and again."""

    def held(self) -> AbstractContextManager[None]:
        """While this process writes here: nobody else may, where that can be seen to."""
        return nullcontext()

    def warning(self) -> str:
        """What this store cannot do that others can; nothing, mostly."""
        return ""

    def free(self) -> int | None:
        """Bytes that can still be written, if that can be told."""
        return None

    def exists(self, name: str) -> bool:
        folder, _, last = name.rpartition("/")
        return last in self.names(folder)


class Folder(Store):
    """A folder on this machine's disk, or on one that all hosts mount."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.url = str(path)

    def names(self, folder: str = "") -> list[str]:
        with suppress(FileNotFoundError, NotADirectoryError):
            return sorted(os.listdir(self.path / folder))
        return []

    def make(self, folder: str) -> None:
        make_folders(self.path / folder)

    @contextmanager
    def write(self, name: str) -> Iterator[BinaryIO]:
        path = self.path / name
        path.parent.mkdir(FOLDER_MODE, exist_ok=True)  # not the one above it: where that is gone, nothing is written
        unfinished = path.with_name(path.name + ".unfinished")
        try:
            with cast(BinaryIO, opened(unfinished, "wb")) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                if hasattr(os, "posix_fadvise"):  # whoever reads it again reads the disk
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            unfinished.rename(path)  # so that whoever sees the name sees the whole file
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        with os.fdopen(os.open(self._regular(name), os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(min(start, size))
            return file.read(max(0, size if stop is None else min(stop, size) - start))

    def size(self, name: str) -> int:
        return self._regular(name).stat().st_size

    def there(self, name: str) -> bool:
        return (self.path / name).exists()

    def _regular(self, name: str) -> Path:
        """A file of this folder: not a device that would be waited for, nor a link to somewhere else."""
        path = (self.path / name).resolve()
        if not path.is_relative_to(self.path.resolve()):
            raise OSError(errno.EPERM, "it leads out of the folder", str(self.path / name))
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(self.path / name))
        return path

    def commit(self, unfinished: str, name: str, last: str, content: bytes) -> None:
        """Write the ``last`` file of a folder and make it appear under its ``name``, which must be free."""
        with self.write(f"{unfinished}/{last}") as file:
            file.write(content)
        sync_folder(self.path / unfinished)
        os.rename(self.path / unfinished, self.path / name)  # fails if a checkpoint of that name is there
        sync_folder(self.path)

    def remove(self, folder: str) -> None:
        """It goes out of sight by one rename, and is then deleted."""
        hidden = self.path / f".removed-{folder.replace('/', '-')}-{os.getpid()}"
        with suppress(FileNotFoundError):
            os.rename(self.path / folder, hidden)
        for left in self.path.glob(".removed-*"):
            shutil.rmtree(left, ignore_errors=True)

    def rename(self, folder: str, name: str) -> None:
        os.rename(self.path / folder, self.path / name)
        sync_folder(self.path)

    def held(self) -> AbstractContextManager[None]:
        self.make("")
        return held(self.path)

    def free(self) -> int | None:
        there = next(p for p in (self.path, *self.path.resolve().parents) if p.exists())
        return shutil.disk_usage(there).free


class Remote(Store):
    """A store that fsspec knows by its URL."""

    def __init__(self, url: str) -> None:
        self._address = url.rstrip("/")
        self.url = redact(self._address)
        self._opened: tuple[int, Any, str] | None = None
        self._open()

    def _open(self) -> tuple[int, Any, str]:
        """The file system, opened by this process: those with threads of their own do not survive a fork."""
        if self._opened is None or self._opened[0] != os.getpid():
            again = {} if self._opened is None else {"skip_instance_cache": True}
            try:
                fs, root = fsspec.core.url_to_fs(self._address, **again)
            except (ImportError, ValueError) as error:
                advice = "Install what it needs, or give a folder."
                raise WrongUse(f"{self.url} cannot be opened: {redact(str(error))}. {advice}") from None
            self._opened = os.getpid(), fs, root
        return self._opened

    @property
    def fs(self) -> Any:
        return self._open()[1]

    @property
    def root(self) -> str:
        return self._open()[2]

    def _at(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def names(self, folder: str = "") -> list[str]:
        self.fs.invalidate_cache()
        with suppress(FileNotFoundError):
            return sorted(path.rstrip("/").rpartition("/")[2] for path in self.fs.ls(self._at(folder), detail=False))
        return []

    def make(self, folder: str) -> None:
        with self.write(f"{folder}/begun") as file:  # such stores have no empty folders
            file.write(b"")

    @contextmanager
    def write(self, name: str) -> Iterator[BinaryIO]:
        self.fs.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)
        with self.fs.open(self._at(name), "wb") as file:
            yield file

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return self.fs.cat_file(self._at(name), start=start or None, end=stop)

    def size(self, name: str) -> int:
        return int(self.fs.size(self._at(name)))

    def there(self, name: str) -> bool:
        self.fs.invalidate_cache()
        return bool(self.fs.exists(self._at(name)))

    def create(self, name: str, content: bytes) -> None:
        """A new file; FileExistsError if it is there, whoever was first."""
        self.fs.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)
        try:
            self.fs.pipe_file(self._at(name), content, mode="create")
        except FileExistsError:
            raise
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EBUSY):  # S3's 412 and 409: somebody was first
                raise
            raise FileExistsError(errno.EEXIST, "is there already", f"{self.url}/{name}") from None

    def warning(self) -> str:
        protocol = self.url.partition("://")[0]
        if protocol in CONDITIONAL:
            return ""
        return (
            f"{protocol}:// is not known to create an object only where there is none: see to it that one run alone "
            f"writes to {self.url}"
        )

    def rename(self, folder: str, name: str) -> None:
        self.fs.makedirs(self._at(name), exist_ok=True)
        for file in self._manifest_first(folder):
            self.fs.mv(self._at(f"{folder}/{file}"), self._at(f"{name}/{file}"))
        self.remove(folder)

    def remove(self, folder: str) -> None:
        with suppress(FileNotFoundError):
            for file in self._manifest_first(folder):
                self.fs.rm(self._at(f"{folder}/{file}"), recursive=True)
            self.fs.rm(self._at(folder), recursive=True)

    def delete(self, name: str) -> None:
        """One file."""
        with suppress(FileNotFoundError):
            self.fs.rm_file(self._at(name))

    def _manifest_first(self, folder: str) -> list[str]:
        """A folder's files in the order in which they go, so that what is left is no checkpoint."""
        return sorted(self.names(folder), key=lambda file: not file.startswith("manifest"))


def open_store(url: str | Path) -> Store:
    """The store behind a path or a URL."""
    text = str(url)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    return Remote(text) if "://" in text else Folder(text)
