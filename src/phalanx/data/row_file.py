"""Rows of a file, each a dict of columns: JSON lines, CSV, parquet, or a folder that Hugging Face's `datasets` saved.

Every row has a place, file and number, for whoever has to say that it is wrong.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.data.rows import BadRow, Row, read_by_arrow, rows
from phalanx.errors import CannotHere, WrongUse

Read = Callable[[int], Any]


class RowFile:
    """All rows of one file or folder; one that is no object is refused when it is asked for."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.exists():
            raise WrongUse(f"the data {path} is not there. Check the path.")
        kind = "saved data set" if self.path.is_dir() else self.path.suffix
        if kind not in KINDS:
            known = ", ".join(name for name in KINDS if name.startswith("."))
            raise WrongUse(f"{path} is none of {known}, nor a folder of Hugging Face's datasets. Convert it to one.")
        self._size, self._read, self._numbers = KINDS[kind](self.path)
        if not self._size:
            raise WrongUse(f"{path} is empty: it has no row. Check what wrote it.")

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._size:
            raise IndexError(index)
        try:
            row = self._read(index)
        except BadRow:
            raise
        except (ValueError, RecursionError) as error:
            raise BadRow(self.path, self.number(index), f"not JSON ({error})") from None
        if not isinstance(row, Mapping):
            raise BadRow(self.path, self.number(index), f"a {type(row).__name__}, not an object with names")
        return dict(row)

    def number(self, index: int) -> int:
        """Where a row stands in its file, as an editor counts."""
        return index + 1 if self._numbers is None else int(self._numbers[index])


def _json_lines(path: Path) -> tuple[int, Read, np.ndarray | None]:
    """Read where they lie; memory: 16 bytes a line."""
    starts, numbers, position = [], [], 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                starts.append(position)
                numbers.append(number)
            position += len(line)

    def read(index: int) -> Any:
        with path.open("rb") as file:  # opened anew, so that workers do not share a file position
            file.seek(starts[index])
            return json.loads(file.readline())

    return len(starts), read, np.array(numbers, dtype=np.int64)


def _json(path: Path) -> tuple[int, Read, np.ndarray | None]:
    """One array of objects; or objects line by line, as some name them so."""
    with path.open("rb") as file:
        if not file.read(64).removeprefix(BOM_UTF8).lstrip().startswith(b"["):
            return _json_lines(path)
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise WrongUse(f"{path} is not JSON ({error}). Mend it.") from None
    return len(found), found.__getitem__, None


def _csv(path: Path) -> tuple[int, Read, np.ndarray | None]:
    """Bad rows keep their places, and are raised when they are asked for."""
    found: list[Row | BadRow] = []
    for good in rows(path, bad=found.append):
        found.append(good)

    def read(index: int) -> Any:
        row = found[index]
        if isinstance(row, BadRow):
            raise row
        return row.values

    return len(found), read, np.array([row.number for row in found], dtype=np.int64)


def _parquet(path: Path) -> tuple[int, Read, np.ndarray | None]:
    with read_by_arrow(path) as file:
        table = file.read()
    return table.num_rows, lambda index: table.slice(index, 1).to_pylist()[0], None


def _saved(path: Path) -> tuple[int, Read, np.ndarray | None]:
    """What `save_to_disk` left: one data set, or several of which ``train`` is taken."""
    try:
        import datasets
    except ImportError:
        raise CannotHere(f"reading the folder {path} needs datasets. Install it: pip install 'phalanx[sft]'") from None
    try:
        found: Any = datasets.load_from_disk(str(path))
    except FileNotFoundError:
        raise WrongUse(
            f"{path} is a folder, and not one that datasets' save_to_disk left. Give a file, or such a folder."
        ) from None
    if isinstance(found, Mapping):
        if "train" not in found:
            raise WrongUse(f"{path} has {', '.join(map(str, found))} and no train. Give the folder of one: {path}/NAME")
        found = found["train"]
    return len(found), found.__getitem__, None


KINDS: dict[str, Callable[[Path], tuple[int, Read, np.ndarray | None]]] = {
    ".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".parquet": _parquet, "saved data set": _saved,
}  # fmt: skip
