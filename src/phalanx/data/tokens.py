"""Tokens on disk or in memory, and packing them into samples of one length with document boundaries kept.

A token file is two files: ``name.tokens.npy`` with all tokens in a row, ``name.ends.npy`` with where each document
ends. Both are plain numpy arrays and are memory-mapped, so opening a terabyte costs nothing.
``name.from.json`` says what they were made from.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from torch import Tensor

from phalanx import streams
from phalanx.data.packing import packed
from phalanx.data.token_manifest import ends_in_order
from phalanx.errors import WrongUse
from phalanx.events import say

FIRST = 16
"""So many documents are encoded to see whether a token file is what it would be now."""
WHOLE = 1 << 26
"""Of documents of so many characters together, or fewer, all are read again to see whether they are the same."""


def write_tokens(
    path: str | Path,
    documents: Iterable[str],
    encode: Callable[[str], Sequence[int]],
    dtype: str = "uint16",
    *,
    again: bool = False,
) -> Path:
    """Encode documents one by one into a token file; returns the path to give to `TokenFile`.

    A file that is there is kept, unless it is to be written ``again``, or was made from other documents or by another
    encoding. Of several ranks that ask, one writes and the others wait for it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if again or not _ends(path).exists():
            _write(path, documents, encode, dtype)
        else:
            one_pass = iter(documents)
            looked: list[str] = []
            reason = _stale(path, documents, one_pass, looked, encode, dtype)
            if reason:
                say(f"   note  {path} is written anew: {reason}", streams.stderr())
                _write(path, itertools.chain(looked, one_pass), encode, dtype)
    finally:
        os.close(folder)
    return path


def _stale(
    path: Path,
    documents: Iterable[str],
    one_pass: Iterator[str],
    looked: list[str],
    encode: Callable[[str], Sequence[int]],
    dtype: str,
) -> str:
    """Why a token file is not what would be written now; empty if it is. What the pass gave for it is ``looked`` at."""
    try:
        file = TokenFile(path)
    except WrongUse as damage:
        return str(damage)
    if file.tokens.dtype != np.dtype(dtype):
        return f"it holds {file.tokens.dtype}, and {dtype} is asked for"
    if isinstance(documents, Sized) and len(documents) != len(file.ends):
        return f"it was made from {len(file.ends)} documents, and there are {len(documents)}"
    made = _made_from(path)
    small = made is not None and made["characters"] <= WHOLE
    looked.extend(one_pass if small else itertools.islice(one_pass, FIRST))
    if len(looked) > len(file.ends) or (small and len(looked) < len(file.ends)):
        return f"it was made from {len(file.ends)} documents, and there are {'' if small else 'at least '}{len(looked)}"
    if small and made is not None and _summed(looked) != made["hash"]:
        return "it was made from other documents"
    for number, document in enumerate(looked[:FIRST]):
        begin = int(file.ends[number - 1]) if number else 0
        found = np.asarray(encode(document), dtype=np.int64)
        if not np.array_equal(found, file.tokens[begin : file.ends[number]].astype(np.int64)):
            return f"document {number} is encoded as other tokens than it holds"
    return ""


def _made_from(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(_from(path).read_text())
        return {"characters": int(found["characters"]), "hash": str(found["hash"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _summed(documents: Iterable[str]) -> str:
    found = hashlib.sha256()
    for document in documents:
        _add(found, document)
    return found.hexdigest()


def _add(found: Any, document: Any) -> None:
    text = document if isinstance(document, bytes) else str(document).encode(errors="surrogatepass")
    found.update(len(text).to_bytes(8, "little") + text)


def _write(path: Path, documents: Iterable[str], encode: Callable[[str], Sequence[int]], dtype: str) -> None:
    raw, ends, total = path.with_name(path.name + ".raw"), [], 0
    largest = np.iinfo(dtype).max
    characters, read = 0, hashlib.sha256()
    with raw.open("wb") as file:
        for number, document in enumerate(documents):
            characters += len(document) if isinstance(document, Sized) else 0
            _add(read, document)
            tokens = np.asarray(encode(document), dtype=np.int64)
            if tokens.size and not 0 <= tokens.min() <= tokens.max() <= largest:
                raw.unlink()
                raise WrongUse(
                    f"document {number} has a token {tokens.max()} that {dtype} cannot hold. Use dtype='uint32'."
                )
            total += tokens.size
            ends.append(total)
            file.write(tokens.astype(dtype).tobytes())
    if not total:
        raw.unlink()
        raise WrongUse(f"there are no tokens to write to {path}. Check the documents.")
    unfinished = path.with_name(path.name + ".unfinished.npy")
    target = open_memmap(unfinished, mode="w+", dtype=dtype, shape=(total,))
    target[:] = np.memmap(raw, dtype=dtype, mode="r")
    target.flush()
    raw.unlink()
    _ends(path).unlink(missing_ok=True)  # of another file, whose tokens go now
    unfinished.replace(_tokens(path))  # who has the old ones open keeps them
    _from(path).write_text(json.dumps({"documents": len(ends), "characters": characters, "hash": read.hexdigest()}))
    np.save(unfinished, np.array(ends, dtype=np.int64))
    unfinished.replace(_ends(path))  # last, and at once: where it is, all is


def _tokens(path: Path) -> Path:
    return path.with_name(path.name + ".tokens.npy")


def _ends(path: Path) -> Path:
    return path.with_name(path.name + ".ends.npy")


def _from(path: Path) -> Path:
    return path.with_name(path.name + ".from.json")


class TokenFile:
    """A memory-mapped token file: ``tokens`` and the ``ends`` of its documents."""

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        for part in (_tokens(path), _ends(path)):
            if not part.is_file():
                raise WrongUse(
                    f"the token file {part} is not there. Write it with phalanx.data.write_tokens({str(path)!r}, ...)."
                )
        self.tokens, self.ends = _numbers(_tokens(path)), _numbers(_ends(path))
        if not ends_in_order(self.ends, len(self.tokens)):
            raise WrongUse(
                f"{_ends(path)} has documents that do not end one after another, up to token {len(self.tokens):,} of "
                f"{_tokens(path)}: one of them is another's, or damaged. Write both again."
            )


def _numbers(path: Path) -> np.ndarray:
    """The whole numbers of a file, in a row; mapped."""
    try:
        found: np.ndarray = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise WrongUse(f"{path} is no array of numbers ({error}). Write it again.") from None
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu" or found.ndim != 1:
        raise WrongUse(f"{path} does not hold whole numbers in a row. Write it again.")
    return found


class PackedTokens:
    """Documents laid end to end and cut into samples of ``length``, so that no place in a batch is wasted.

    A sample has ``tokens``; ``targets``, the next token, or -100 where the next one belongs to another document;
    ``documents``, which document each token is from; and ``positions``, counted from its document's start or, in a
    document that began before, from the sample's.
    """

    def __init__(self, tokens: np.ndarray, ends: np.ndarray, length: int, pad: int = 0) -> None:
        if length < 1:
            raise WrongUse(f"length={length} is no length for a sample. Set it to 1 or more.")
        if len(tokens) < 2 or not len(ends) or ends[-1] != len(tokens):
            raise WrongUse(
                f"{len(tokens)} tokens, and the last document ends at {ends[-1] if len(ends) else 'none'}. "
                "Give at least two tokens, and ends that reach the last one."
            )
        self.tokens, self.ends, self.length, self.pad = tokens, ends, length, pad

    @classmethod
    def of(cls, file: TokenFile, length: int) -> PackedTokens:
        return cls(file.tokens, file.ends, length)

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // self.length)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.length
        stop = min(start + self.length + 1, len(self.tokens))
        first, last = np.searchsorted(self.ends, [start, stop], side="right")
        return packed(self.tokens[start:stop], self.ends[first:last] - start, self.length, self.pad)
