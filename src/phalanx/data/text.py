"""Documents of text, read where they lie: JSON lines and parquet. Pack them with `write_tokens` and `PackedTokens`.

Parquet's columns can be samples, too.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.data.columns import no_column
from phalanx.data.rows import read_by_arrow
from phalanx.errors import WrongUse, closest
from phalanx.words import many

SHOWN = 4


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
        except (ValueError, RecursionError) as error:
            raise WrongUse(f"{self.path}, object {index + 1}: not JSON ({error}). Mend or remove that line.") from None
        if not isinstance(record, dict) or self.field not in record:
            known = record if isinstance(record, dict) else []
            raise WrongUse(f"{self.path}, object {index + 1} has no field {self.field!r}; {closest(self.field, known)}")
        return str(record[self.field])


class Parquet:
    """A parquet file, of one column of text, or with ``columns`` of samples. Needs ``phalanx[parquet]``.

    Document i is row i of ``column``: one row group is in memory. With ``columns=["x", "label"]`` sample i is a dict of
    row i of these, and they are in memory whole: numbers and lists of numbers as tensors, text as it is.
    """

    def __init__(self, path: str | Path, column: str = "text", *, columns: Sequence[str] | None = None) -> None:
        self.path, self.name = _existing(path), column
        with read_by_arrow(self.path) as file:
            metadata, known = file.metadata, file.schema_arrow.names
            for name in [column] if columns is None else columns:
                if name not in known:
                    several = "" if columns is not None else f". For samples of several: columns={known[:SHOWN]}"
                    raise WrongUse(f"{self.path} has no column {name!r}; {closest(name, known)}{several}")
            rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            self.columns = None if columns is None else {n: _column(file, n, self.path) for n in columns}
        self._ends = [int(end) for end in np.cumsum(rows)]
        self._group: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        if self.columns is not None:
            return {name: column[index] for name, column in self.columns.items()}
        number = bisect.bisect_right(self._ends, index)
        if self._group[0] != number:
            with read_by_arrow(self.path) as file:
                self._group = number, file.read_row_group(number, columns=[self.name]).column(0)
        first = self._ends[number - 1] if number else 0
        return str(self._group[1][index - first].as_py())

    @property
    def by_rows(self) -> bool:
        """Whether `batch` gives many samples at once: where each column is one tensor."""
        return self.columns is not None and all(isinstance(each, Tensor) for each in self.columns.values())

    def batch(self, ids: np.ndarray) -> dict[str, Tensor]:
        """Many rows in one indexing operation a column."""
        return {name: column[ids] for name, column in (self.columns or {}).items()}

    def column(self, name: str) -> Any:
        """A column of all samples."""
        if not self.columns or name not in self.columns:
            raise no_column(name, self.columns or ())
        return self.columns[name]


class Lists:
    """A column of lists of different lengths: a tensor for each row."""

    def __init__(self, values: Tensor, ends: np.ndarray) -> None:
        self.values, self.ends = values, ends

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> Tensor:
        return self.values[self.ends[index] : self.ends[index + 1]].clone()


def _column(file: Any, name: str, path: Path) -> Any:
    """A column in memory: a tensor, lists of numbers, or texts."""
    import pyarrow.compute
    from pyarrow import types

    column = file.read(columns=[name]).column(name)
    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    listed = types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type)
    inner = pyarrow.compute.list_flatten(column) if listed else column
    if nulls := column.null_count + (inner.null_count if listed else 0):
        raise WrongUse(
            f"{name!r} of {path} has {many(nulls, 'row')} without a value. Fill or leave them out when it is written."
        )
    if types.is_string(column.type) or types.is_large_string(column.type):
        return column.to_pylist()
    if not any(is_one(inner.type) for is_one in (types.is_integer, types.is_floating, types.is_boolean)):
        raise WrongUse(
            f"{name!r} of {path} is {column.type}. Samples hold numbers, lists of numbers and text: write it as one of "
            "these."
        )
    values = torch.from_numpy(np.array(inner.to_numpy()))
    if not listed:
        return values
    lengths = pyarrow.compute.list_value_length(column).to_numpy()
    if len(each := np.unique(lengths)) == 1:
        return values.view(len(column), int(each[0]))
    return Lists(values, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
