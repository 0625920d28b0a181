"""The task's code, for hosts that do not see the folder it lies in: the user's modules and what lies beside them.

It is sent as it lies here, by full paths, into a folder of each host's that is the run's own. So relative imports,
relative names and PYTHONPATH mean there what they mean here. What else a task reads is not sent.
"""

from __future__ import annotations

import base64
import io
import os
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx import user_code
from phalanx.errors import CannotHere
from phalanx.launch.place import Command
from phalanx.words import in_bytes

MOST_BYTES = 32 << 20
PATHS = ("--checkpoints", "--init-from")
"""Options whose values may be paths."""


@dataclass(frozen=True)
class PackedCode:
    """Files of the user's, by their full paths."""

    files: tuple[Path, ...]
    packed: str
    """A tar archive, as text."""

    @classmethod
    def here(cls) -> PackedCode:
        """Of the modules that have been imported, and those beside them, which may be later."""
        found = dict.fromkeys(user_code.modules().values())
        found |= dict.fromkeys(_beside(found))
        total = sum(path.stat().st_size for path in found)
        if total > MOST_BYTES:
            raise CannotHere(
                f"the task's code and what lies beside it has {in_bytes(total)}, more than is copied to hosts "
                f"({in_bytes(MOST_BYTES)}). Put the code into a folder of its own, or into one that all hosts see."
            )
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            for path in sorted(found):
                content = path.read_bytes()
                entry = tarfile.TarInfo(str(path.relative_to("/")))
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
        return cls(tuple(sorted(found)), base64.b64encode(buffer.getvalue()).decode())

    def moved(self, command: Command, to: str) -> Command:
        """The same command where the files lie under another folder."""
        task, *others = command.words
        file, colon, name = task.partition(":")
        if Path(file).is_absolute() and Path(file).resolve() in self.files:
            task = f"{_under(to, Path(file).resolve())}{colon}{name}"
        for number, word in enumerate(others[:-1]):
            if word in PATHS and "://" not in others[number + 1]:
                others[number + 1] = str((command.folder / others[number + 1]).resolve())
        return replace(command, words=(task, *others), folder=Path(_under(to, command.folder)))

    def moved_path(self, variables: Mapping[str, str], to: str) -> dict[str, str]:
        """Variables with a PYTHONPATH that leads to the files there first, in the order of this process."""
        entries = [entry for entry in variables.get("PYTHONPATH", "").split(os.pathsep) if entry]
        roots = dict.fromkeys(Path(entry).resolve() for entry in sys.path)
        there = [_under(to, root) for root in roots if self._below(root)]
        return {**variables, "PYTHONPATH": os.pathsep.join([*there, *entries])}

    def _below(self, folder: Path) -> bool:
        return any(path.is_relative_to(folder) for path in self.files)


def _under(root: str, path: Path) -> str:
    return f"{root}{path}"


def _beside(files: Iterable[Path]) -> Iterator[Path]:
    """Of each file's folder, and of all of its package, the files with Python in them."""
    for folder in dict.fromkeys(path.parent for path in files):
        root = folder
        while (root / "__init__.py").exists():
            root = root.parent
        package = root / folder.relative_to(root).parts[0] if root != folder else None
        for path in sorted(package.rglob("*.py") if package else folder.glob("*.py")):
            if path.is_file():
                yield path.resolve()
