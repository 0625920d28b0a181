"""Documents of text, read where they lie: JSON lines and parquet. Pack them with `write_tokens` and `PackedTokens`."""

from __future__ import annotations

import bisect
import json
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.errors import CannotHere, WrongUse, closest


def _existing(path: str | Path) -> Path:
    path = Path(path)
    if not path.is_file():
        raise WrongUse(f"the data file {path} is not there. Check the path.")
    return path


class JsonLines:
    """A file of JSON objects, one a line; document i is the text under ``field``. Memory: 8 bytes a line."""

    def __init__(self, path: str | Path, field: str = "text") -> None:
        self.path, self.field = _existing(path), field
        starts, position = [], 0
        with self.path.open("rb") as file:
            for line in file:
                if line.strip():
                    starts.append(position)
                position += len(line)
        self.starts = np.array(starts, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> str:
        with self.path.open("rb") as file:  # opened anew, so that workers do not share a file position
            file.seek(self.starts[index])
            line = file.readline()
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise WrongUse(f"{self.path}, object {index + 1}: not JSON ({error}). Mend or remove that line.") from None
        if not isinstance(record, dict) or self.field not in record:
            known = record if isinstance(record, dict) else []
            raise WrongUse(f"{self.path}, object {index + 1} has no field {self.field!r}; {closest(self.field, known)}")
        return str(record[self.field])


class Parquet:
    """A parquet file; document i is row i of ``column``. Keeps one row group in memory. Needs ``phalanx[parquet]``."""

    def __init__(self, path: str | Path, column: str = "text") -> None:
        try:
            import pyarrow.parquet
        except ImportError:
            raise CannotHere("reading parquet needs pyarrow. Install it: pip install 'phalanx[parquet]'") from None
        self.path, self.column = _existing(path), column
        self._file: Any = pyarrow.parquet.ParquetFile(self.path)
        names = self._file.schema_arrow.names
        if column not in names:
            raise WrongUse(f"{self.path} has no column {column!r}; {closest(column, names)}")
        metadata = self._file.metadata
        rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        self._ends = [int(end) for end in np.cumsum(rows)]
        self._group: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect.bisect_right(self._ends, index)
        if self._group[0] != number:
            self._group = number, self._file.read_row_group(number, columns=[self.column]).column(0)
        first = self._ends[number - 1] if number else 0
        return str(self._group[1][index - first].as_py())
