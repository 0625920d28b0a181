"""Which checkpoints are committed, and by whom: only the newest generation of ranks may commit one.

On disk a folder appears by its rename, all at once; a generation writes in a folder that the next one takes away.
Stores of objects have no rename. There what is committed stands in a log, each entry of which is the whole truth as of
then and is created only if nobody else has created one of that number: whoever comes too late sees what was said
meanwhile, and that a later generation has begun.
"""

from __future__ import annotations

import errno
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field

from phalanx.checkpoint.manifest import MANIFEST
from phalanx.checkpoint.store import Folder, Remote, Store
from phalanx.errors import CannotHere

LOG = "log"
KEPT = 16
"""So many entries of a log are kept; the newest alone is read."""


class Fenced(Exception):
    """A later generation of the run has begun, and this one may not commit any more."""


def name_of(step: int) -> str:
    """What a step's checkpoint is called."""
    return f"step-{step:08d}"


class Commits(ABC):
    """A store's."""

    store: Store

    @abstractmethod
    def folders(self) -> dict[int, str]:
        """Of each committed step, the folder; the oldest first."""

    @abstractmethod
    def generation(self) -> int:
        """The newest generation that has begun to write here; 0 if none is known."""

    @abstractmethod
    def fence(self, generation: int) -> None:
        """From now on only this generation commits: what older ones were writing is taken away from them."""

    @abstractmethod
    def writing(self, generation: int, step: int) -> str:
        """The folder in which a generation writes a step."""

    @abstractmethod
    def unfinished(self, generation: int | None = None) -> list[str]:
        """Folders that a generation, or any, has begun to write and not committed."""

    @abstractmethod
    def commit(self, generation: int, step: int, content: bytes, files: Collection[str]) -> None:
        """Make a checkpoint of what was written; its manifest is the ``content``, and all ``files`` must be there."""

    @abstractmethod
    def take_out(self, step: int, name: str | None = None) -> None:
        """A checkpoint is none any more: it is removed, or its folder gets another name."""

    @abstractmethod
    def close(self, generation: int) -> None:
        """A generation is done."""

    def check(self, generation: int) -> None:
        if self.generation() > generation:
            raise Fenced(f"generation {generation} of this run is over: a later one has begun, and only that may save")

    def _there_already(self, step: int) -> FileExistsError:
        return FileExistsError(f"{self.store.url}/{name_of(step)} is there already; it was left as it is")

    def _taken_away(self, generation: int, step: int) -> Fenced:
        return Fenced(f"generation {generation} may not commit step {step}: a later one has begun")


class ByRename(Commits):
    """In a folder: ``step-00000100`` is committed, ``.writing-00003/step-00000200`` not yet, by generation 3."""

    def __init__(self, store: Folder) -> None:
        self.store: Folder = store

    def folders(self) -> dict[int, str]:
        found = (re.fullmatch(r"step-(\d+)", name) for name in self.store.names())
        return dict(sorted((int(match[1]), match[0]) for match in found if match))

    def generation(self) -> int:
        return max(self._generations(), default=0)

    def fence(self, generation: int) -> None:
        self.check(generation)
        self.store.make(_writing(generation))
        for older in self._generations():
            if older < generation:
                self.store.remove(_writing(older))

    def writing(self, generation: int, step: int) -> str:
        return f"{_writing(generation)}/{name_of(step)}"

    def unfinished(self, generation: int | None = None) -> list[str]:
        folders = [_writing(known) for known in self._generations() if generation in (None, known)]
        return [f"{folder}/{name}" for folder in folders for name in self.store.names(folder)]

    def commit(self, generation: int, step: int, content: bytes, files: Collection[str]) -> None:
        try:
            self.store.commit(self.writing(generation, step), name_of(step), MANIFEST, content)
        except FileNotFoundError:
            raise self._taken_away(generation, step) from None
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            raise self._there_already(step) from None

    def take_out(self, step: int, name: str | None = None) -> None:
        if name is None:
            self.store.remove(name_of(step))
        else:
            self.store.rename(name_of(step), name)

    def close(self, generation: int) -> None:
        """Leave no empty folder behind."""
        if not self.store.names(_writing(generation)):
            self.store.remove(_writing(generation))

    def _generations(self) -> list[int]:
        return [int(match[1]) for name in self.store.names() if (match := re.fullmatch(r"\.writing-(\d+)", name))]


@dataclass(frozen=True)
class LogEntry:
    """All that is committed, and by which generation the next may be."""

    generation: int = 0
    steps: dict[int, str] = field(default_factory=dict)
    """Of each committed step, the folder."""


class ByLog(Commits):
    """In a store of objects: ``step-00000100.00003`` is of generation 3, and committed if the log's last entry says."""

    def __init__(self, store: Remote) -> None:
        self.store: Remote = store

    def folders(self) -> dict[int, str]:
        return dict(sorted(self._newest()[1].steps.items()))

    def generation(self) -> int:
        return self._newest()[1].generation

    def fence(self, generation: int) -> None:
        self.check(generation)
        self._append(generation, lambda entry: LogEntry(generation, entry.steps), begins=True)
        for folder in self.unfinished():
            if int(folder.rpartition(".")[2]) < generation:
                self.store.remove(folder)

    def writing(self, generation: int, step: int) -> str:
        return f"{name_of(step)}.{generation:05d}"

    def unfinished(self, generation: int | None = None) -> list[str]:
        ending = r"\d+" if generation is None else f"{generation:05d}"
        committed = set(self.folders().values())
        named = (name for name in self.store.names() if re.fullmatch(rf"step-\d+\.{ending}", name))
        return [name for name in named if name not in committed]

    def commit(self, generation: int, step: int, content: bytes, files: Collection[str]) -> None:
        folder = self.writing(generation, step)
        if set(files) - set(self.store.names(folder)):
            raise self._taken_away(generation, step)
        with self.store.write(f"{folder}/{MANIFEST}") as out:
            out.write(content)

        def added(entry: LogEntry) -> LogEntry:
            if step in entry.steps:
                raise self._there_already(step)
            return LogEntry(generation, {**entry.steps, step: folder})

        self._append(generation, added)

    def take_out(self, step: int, name: str | None = None) -> None:
        folder = self.folders()[step]
        self._append(None, lambda e: LogEntry(e.generation, {s: f for s, f in e.steps.items() if s != step}))
        if name is None:
            self.store.remove(folder)
        else:
            self.store.rename(folder, name)

    def close(self, generation: int) -> None:
        """The number of the last generation stays in the log."""

    def _append(self, generation: int | None, change: Callable[[LogEntry], LogEntry], begins: bool = False) -> None:
        """Add an entry after the newest, as ``generation`` if it still may; again if somebody else was first."""
        while True:
            number, entry = self._newest()
            if generation is not None and (
                entry.generation > generation or not (begins or entry.generation == generation)
            ):
                raise Fenced(f"generation {generation} of this run is over: generation {entry.generation} has begun")
            changed = change(entry)
            try:
                self.store.create(f"{LOG}/{number + 1:08d}", json.dumps(asdict(changed)).encode())
            except FileExistsError:
                if self._newest() == (number + 1, changed):
                    return  # its own, whose acknowledgement was lost on the way
                continue
            numbers = self._numbers()
            late = numbers[-1] > number + KEPT  # so late that its number had been let go of, and was free again
            for old in [number + 1] if late else numbers[:-KEPT]:
                self.store.delete(f"{LOG}/{old:08d}")
            if not late:
                return

    def _numbers(self) -> list[int]:
        return [int(name) for name in self.store.names(LOG) if re.fullmatch(r"\d{8}", name)]

    def _newest(self) -> tuple[int, LogEntry]:
        """The last entry and its number; before there is one, what checkpoints were there without."""
        number = max(self._numbers(), default=0)
        if not number:
            found = {int(name[5:]): name for name in self.store.names() if re.fullmatch(r"step-\d+", name)}
            return 0, LogEntry(0, {s: name for s, name in found.items() if self.store.exists(f"{name}/{MANIFEST}")})
        try:
            found = json.loads(self.store.read(f"{LOG}/{number:08d}"))
            steps = {int(step): str(folder) for step, folder in found["steps"].items()}
            if not all(re.fullmatch(rf"{name_of(step)}(\.\d+)?", folder) for step, folder in steps.items()):
                raise ValueError("it names a folder that is no checkpoint's")
            return number, LogEntry(int(found["generation"]), steps)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CannotHere(
                f"{self.store.url}/{LOG}/{number:08d}, which lists the checkpoints, cannot be understood: {error}. Put "
                "back what it was, or remove it: then the entry before it is taken, older by one commit or removal."
            ) from None


def commits_of(store: Store) -> Commits:
    if isinstance(store, Folder):
        return ByRename(store)
    assert isinstance(store, Remote)
    return ByLog(store)


def _writing(generation: int) -> str:
    return f".writing-{generation:05d}"
