"""One part of a source, encoded: what a worker of ``phalanx tokenize`` does, and what it leaves.

A part is three files in the unfinished folder: ids, ends of documents, and a record that is written last and says what
the others must be. Which text is encoded together follows from the sources alone, never from who encodes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from phalanx.data.rows import BadRow, FilePart, Row, read, text_of
from phalanx.data.token_manifest import ENDS, block_hash
from phalanx.data.tokenizer import Tokenizer

TOGETHER = 1 << 20
"""Characters that are encoded in one call, at least; a plain text is cut after a line into pieces of about as many."""
NAMED = 100
"""Bad rows of which the reason is kept."""


@dataclass
class PartRecord:
    """What a part came to."""

    tokens: int = 0
    documents: int = 0
    empty: int = 0
    bad: int = 0
    bad_rows: list[str] = field(default_factory=list)
    hashes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Encoder:
    """Encodes parts of sources into files of a folder."""

    tokenizer: Tokenizer
    parts: Sequence[FilePart]
    column: str
    skip: bool
    """Whether bad rows are left out; else the first one ends it."""
    folder: Path

    def encode(self, number: int) -> PartRecord:
        """Encode a part into its files."""
        part, record = self.parts[number], PartRecord()
        ends: list[int] = []
        written = hashlib.sha256()
        with self.path(number, "tokens").open("wb") as file:
            for texts in self._batches(part, record):
                ids: list[np.ndarray] = []
                for found in self.tokenizer.encode(texts):
                    ids.append(found)
                    record.tokens += len(found)
                    if part.kind != "text":
                        self._end(ids, ends, record)
                self._add(file, written, ids)
            if part.kind == "text" and closes(part):
                ids = []
                self._end(ids, ends, record)
                self._add(file, written, ids)
        content = np.array(ends, dtype=ENDS).tobytes()
        self.path(number, "ends").write_bytes(content)
        record.documents = len(ends)
        record.hashes = {"tokens": written.hexdigest()[:32], "ends": block_hash(content)}
        path = self.path(number, "json")
        unfinished = path.with_name(f"{path.name}.unfinished")
        unfinished.write_text(json.dumps(asdict(record)))
        unfinished.rename(path)
        return record

    def known(self, number: int) -> PartRecord | None:
        """What a part came to that was encoded before; None if it was not."""
        try:
            return PartRecord(**json.loads(self.path(number, "json").read_bytes()))
        except (OSError, ValueError, TypeError, RecursionError):
            return None

    def arrays(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """A part's ids and ends, encoded again where the files are not what the record says."""
        record, contents = self.known(number), self._contents(number)
        if record is None or record.hashes != {ending: block_hash(each) for ending, each in contents.items()}:
            self.encode(number)
            contents = self._contents(number)
        return np.frombuffer(contents["tokens"], self.tokenizer.dtype), np.frombuffer(contents["ends"], ENDS)

    def forget(self, number: int) -> None:
        """Take a part's files away, its record first."""
        for ending in ("json", "tokens", "ends"):
            self.path(number, ending).unlink(missing_ok=True)

    def path(self, number: int, ending: str) -> Path:
        return self.folder / f"part-{number:07d}.{ending}"

    def _batches(self, part: FilePart, record: PartRecord) -> Iterator[list[str]]:
        """The texts of a part, some at a time."""

        def bad(row: BadRow) -> None:
            if not self.skip:
                raise row
            record.bad += 1
            if len(record.bad_rows) < NAMED:
                record.bad_rows.append(f"{row.path.name}, row {row.number}: {row.reason}")

        texts, characters = [], 0
        for row in read(part, [self.column] if part.kind in ("parquet", "csv") else None, bad):
            try:
                found = pieces(row.values["text"]) if part.kind == "text" else [self._text(row)]
            except BadRow as wrong:
                bad(BadRow(wrong.path, wrong.number + part.rows_before, wrong.reason))
                continue
            for text in found:
                if not text:
                    record.empty += 1
                    continue
                texts.append(text)
                characters += len(text)
                if characters >= TOGETHER:
                    yield texts
                    texts, characters = [], 0
        if texts:
            yield texts

    def _text(self, row: Row) -> str:
        text = text_of(row, self.column)
        if not text.isascii() and _halved(text):
            raise BadRow(row.path, row.number, f"{self.column!r} is no Unicode text: it has half of a surrogate pair")
        return text

    def _end(self, ids: list[np.ndarray], ends: list[int], record: PartRecord) -> None:
        """Close a document."""
        if self.tokenizer.end is not None:
            ids.append(np.array([self.tokenizer.end], dtype=self.tokenizer.dtype))
            record.tokens += 1
        ends.append(record.tokens)

    def _add(self, file: IO[bytes], written: Any, ids: list[np.ndarray]) -> None:
        if ids:
            content = np.concatenate(ids).astype(self.tokenizer.dtype, copy=False).tobytes()
            file.write(content)
            written.update(content)

    def _contents(self, number: int) -> dict[str, bytes]:
        paths = {ending: self.path(number, ending) for ending in ("tokens", "ends")}
        return {ending: path.read_bytes() if path.is_file() else b"" for ending, path in paths.items()}


def closes(part: FilePart) -> bool:
    """Whether a part of a plain text is its last."""
    return part.stop is None or part.stop >= part.path.stat().st_size


def pieces(text: str) -> list[str]:
    """A long text in pieces that end with a line each."""
    found, start = [], 0
    while len(text) - start > TOGETHER:
        cut = text.rfind("\n", start, start + TOGETHER) + 1
        cut = cut if cut > start else start + TOGETHER
        found.append(text[start:cut])
        start = cut
    return [*found, text[start:]]


def _halved(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
