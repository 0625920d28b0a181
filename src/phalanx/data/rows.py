"""Rows of files that people have: JSON lines, CSV, parquet and plain text, as ``(path, number, values)``.

JSON lines, CSV and text may be compressed (``.gz``, ``.zst``). Large files are read in parts, each by itself, so that
several processes can share one. A row that is none is a `BadRow`, which names its file and its number.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

from phalanx.errors import CannotHere, WrongUse, closest

KINDS = {
    ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text", ".md": "text",
    ".rst": "text", ".py": "text",
}  # fmt: skip
PACKED = (".gz", ".zst")
LONGEST_CELL = 1 << 30
FLUSHED = 1 << 20
"""Bytes that are looked through at a time when lines are counted."""


class Row(NamedTuple):
    """A row: its file, its number in the part of the file that is read, from 1, and its columns by name."""

    path: Path
    number: int
    values: dict[str, Any]


class BadRow(WrongUse):
    """A row that is none, named by its file and its number there."""

    def __init__(self, path: Path, number: int, reason: str) -> None:
        super().__init__(f"{path}, row {number:,}: {reason}. Mend or remove that row.")
        self.path, self.number, self.reason = path, number, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return BadRow, (self.path, self.number, self.reason)


Told = Callable[[BadRow], None]
"""Told of a bad row, which is then left out."""


@dataclass(frozen=True)
class FilePart:
    """Part of a file: lines that begin in bytes ``start`` to ``stop``, or those row groups of a parquet file."""

    path: Path
    start: int = 0
    stop: int | None = None

    @property
    def kind(self) -> str:
        return kind_of(self.path)

    @cached_property
    def rows_before(self) -> int:
        """How many rows of the file lie before this part. Lines are counted for it: it is asked for bad rows only."""
        if self.kind == "parquet":
            return sum(_groups(self.path)[: self.start])
        count, left, inside = 0, self.start, False
        with opened(self.path) as file:
            while left and (block := file.read(min(left, FLUSHED))):
                count, left = count + block.count(b"\n"), left - len(block)
                inside = not block.endswith(b"\n")
        return count + inside  # a line that began before is no row of this part


def kind_of(path: Path) -> str:
    """``json``, ``csv``, ``parquet`` or ``text``, by the name of a file."""
    name = path.name.lower()
    for ending in PACKED:
        name = name.removesuffix(ending)
    kind = KINDS.get(Path(name).suffix)
    if kind is None or (kind == "parquet" and path.suffix.lower() in PACKED):
        known = f"{', '.join(KINDS)}, and all but .parquet with {' or '.join(PACKED)} after it"
        raise WrongUse(f"{path} is of no known kind. Name it by what it is: {known}.")
    return kind


def files_of(paths: Iterable[str | Path]) -> list[Path]:
    """These files, and those of known kinds in these folders, in the order of their names."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = [each for each in sorted(path.rglob("*")) if each.is_file() and _known(each)]
            if not inside:
                raise WrongUse(f"the folder {path} has no file of a known kind. Known are: {', '.join(KINDS)}.")
            found += inside
        elif path.is_file():
            kind_of(path)
            found.append(path)
        else:
            raise WrongUse(f"the data file {path} is not there. Check the path.")
    return found


def _known(path: Path) -> bool:
    try:
        return bool(kind_of(path))
    except WrongUse:
        return False


def parts_of(path: Path, size: int) -> list[FilePart]:
    """A file in parts of about ``size`` bytes; one where it must be read from its beginning."""
    kind = kind_of(path)
    if kind == "parquet":
        ends, bytes_ = [0], 0
        with read_by_arrow(path) as file:
            groups = file.metadata.num_row_groups
            for number in range(groups):
                bytes_ += file.metadata.row_group(number).total_byte_size
                if bytes_ >= size or number == groups - 1:
                    ends.append(number + 1)
                    bytes_ = 0
        return [FilePart(path, start, stop) for start, stop in pairwise(ends)]
    if kind == "csv" or path.suffix.lower() in PACKED:
        return [FilePart(path)]
    length = path.stat().st_size
    return [FilePart(path, start, min(start + size, length)) for start in range(0, length, size)]


def rows(path: str | Path, columns: Sequence[str] | None = None, bad: Told | None = None) -> Iterator[Row]:
    """The rows of a file, in order; without ``bad``, the first bad one is raised. A text file is one row."""
    yield from read(FilePart(Path(path)), columns, bad)


def read(part: FilePart, columns: Sequence[str] | None = None, bad: Told | None = None) -> Iterator[Row]:
    """The rows of a part. ``columns``: of a parquet file read these alone."""
    for found in READERS[part.kind](part, columns):
        if isinstance(found, Row):
            yield found
            continue
        wrong = BadRow(found.path, found.number + part.rows_before, found.reason)
        if bad is None:
            raise wrong
        bad(wrong)


def text_of(row: Row, field: str) -> str:
    """The text under a field of a row; a `BadRow` where there is none."""
    if field not in row.values:
        raise BadRow(row.path, row.number, f"it has no field {field!r}; {closest(field, row.values)}")
    value = row.values[field]
    if not isinstance(value, str):
        raise BadRow(row.path, row.number, f"{field!r} is {_named(value)}, not text")
    return value


def _named(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A file's bytes, unpacked; what cannot be unpacked is said to be so."""
    suffix = path.suffix.lower()
    try:
        if suffix == ".gz":
            with gzip.open(path, "rb") as file:
                yield file  # type: ignore[misc]
        elif suffix == ".zst":
            arrow = _arrow(f"reading {path}")
            with arrow.input_stream(str(path), compression="zstd") as stream, io.BufferedReader(stream) as file:
                yield file
        else:
            with path.open("rb") as file:
                yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise WrongUse(f"{path} cannot be unpacked: {error}. It may be cut off; fetch it again.") from None
    except OSError as error:
        if suffix != ".zst" or error.errno is not None:
            raise
        raise WrongUse(f"{path} cannot be unpacked: {error}. It may be cut off; fetch it again.") from None


def _lines(part: FilePart) -> Iterator[bytes]:
    """The lines that begin in a part, with their ends."""
    with opened(part.path) as file:
        position = part.start
        if part.start:
            file.seek(part.start - 1)
            position += len(file.readline()) - 1
        while part.stop is None or position < part.stop:
            line = file.readline()
            if not line:
                return
            position += len(line)
            yield line


def _json(part: FilePart, columns: Sequence[str] | None) -> Iterator[Row | BadRow]:
    for number, line in enumerate(_lines(part), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield BadRow(part.path, number, f"it is not JSON ({error})")
            continue
        if isinstance(found, dict):
            yield Row(part.path, number, found)
        else:
            yield BadRow(part.path, number, f"it is {_named(found)}, not an object with fields")


def _text(part: FilePart, columns: Sequence[str] | None) -> Iterator[Row | BadRow]:
    """All lines of the part as one text; a line that is no UTF-8 is bad by itself."""
    lines = list(_lines(part))
    if lines and not part.start:
        lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
    try:
        text = b"".join(lines).decode()
    except UnicodeDecodeError:
        good = []
        for number, line in enumerate(lines, 1):
            try:
                good.append(line.decode())
            except UnicodeDecodeError as error:
                yield BadRow(part.path, number, f"it is no UTF-8 text ({error.reason})")
        text = "".join(good)
    if text:
        yield Row(part.path, 1, {"text": text})


def _csv(part: FilePart, columns: Sequence[str] | None) -> Iterator[Row | BadRow]:
    csv.field_size_limit(LONGEST_CELL)
    with opened(part.path) as file:
        reader = csv.DictReader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), strict=True)
        try:
            names = reader.fieldnames or []
            _check_columns(part.path, columns, names)
            for values in reader:
                more: Any = values.pop(None, ())
                cells = sum(value is not None for value in values.values()) + len(more)
                if cells != len(names):
                    yield BadRow(part.path, reader.line_num, f"it has {cells} cells, and the first line {len(names)}")
                else:
                    yield Row(part.path, reader.line_num, values)
        except (csv.Error, UnicodeDecodeError) as error:
            raise BadRow(part.path, reader.line_num + 1, f"it is no CSV from there on ({error})") from None


def _parquet(part: FilePart, columns: Sequence[str] | None) -> Iterator[Row | BadRow]:
    with read_by_arrow(part.path) as file:
        _check_columns(part.path, columns, file.schema_arrow.names)
        groups = list(range(file.metadata.num_row_groups))[part.start : part.stop]
        number = 0
        for batch in file.iter_batches(row_groups=groups, columns=None if columns is None else list(columns)):
            for values in batch.to_pylist():
                number += 1
                yield Row(part.path, number, values)


def _check_columns(path: Path, columns: Sequence[str] | None, known: Sequence[str]) -> None:
    for name in columns or ():
        if name not in known:
            raise WrongUse(f"{path} has no column {name!r}; {closest(name, known)}")


def _groups(path: Path) -> list[int]:
    with read_by_arrow(path) as file:
        return [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]


@contextmanager
def read_by_arrow(path: Path) -> Iterator[Any]:
    """A parquet file, open; one that is damaged is said to be so."""
    arrow = _arrow(f"reading {path}")
    try:
        with arrow.parquet.ParquetFile(path) as file:
            yield file
    except (arrow.ArrowInvalid, OSError) as error:
        if getattr(error, "errno", None) is not None:  # not of the file's content
            raise
        said = str(error).splitlines()[0]
        raise WrongUse(f"{path} is no parquet file that can be read: {said}. Write it again.") from None


def _arrow(purpose: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise CannotHere(f"{purpose} needs pyarrow. Install it: pip install 'phalanx[parquet]'") from None
    return pyarrow


READERS: dict[str, Callable[[FilePart, Sequence[str] | None], Iterator[Row | BadRow]]] = {
    "json": _json, "csv": _csv, "parquet": _parquet, "text": _text
}  # fmt: skip
