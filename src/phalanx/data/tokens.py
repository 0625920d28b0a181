"""Tokens on disk or in memory, and packing them into samples of one length with document boundaries kept.

A token file is two files: ``name.tokens.npy`` with all tokens in a row, ``name.ends.npy`` with where each document
ends. Both are plain numpy arrays and are memory-mapped, so opening a terabyte costs nothing.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.lib.format import open_memmap
from torch import Tensor

from phalanx.errors import WrongUse

IGNORE = -100


def write_tokens(
    path: str | Path,
    documents: Iterable[str],
    encode: Callable[[str], Sequence[int]],
    dtype: str = "uint16",
    *,
    again: bool = False,
) -> Path:
    """Encode documents one by one into a token file; returns the path to give to `TokenFile`.

    A file that is there is kept, unless it is to be written ``again``. Of several ranks that ask, one writes and the
    others wait for it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if again or not _ends(path).exists():
            _write(path, documents, encode, dtype)
    finally:
        os.close(folder)
    return path


def _write(path: Path, documents: Iterable[str], encode: Callable[[str], Sequence[int]], dtype: str) -> None:
    raw, ends, total = path.with_name(path.name + ".raw"), [], 0
    largest = np.iinfo(dtype).max
    with raw.open("wb") as file:
        for number, document in enumerate(documents):
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
    target = open_memmap(_tokens(path), mode="w+", dtype=dtype, shape=(total,))
    target[:] = np.memmap(raw, dtype=dtype, mode="r")
    target.flush()
    raw.unlink()
    unfinished = path.with_name(path.name + ".unfinished.npy")
    np.save(unfinished, np.array(ends, dtype=np.int64))
    unfinished.replace(_ends(path))  # last, and at once: where it is, all is


def _tokens(path: Path) -> Path:
    return path.with_name(path.name + ".tokens.npy")


def _ends(path: Path) -> Path:
    return path.with_name(path.name + ".ends.npy")


class TokenFile:
    """A memory-mapped token file: ``tokens`` and the ``ends`` of its documents."""

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        for part in (_tokens(path), _ends(path)):
            if not part.is_file():
                raise WrongUse(
                    f"the token file {part} is not there. Write it with phalanx.data.write_tokens({str(path)!r}, ...)."
                )
        self.tokens: np.ndarray = np.load(_tokens(path), mmap_mode="r")
        self.ends: np.ndarray = np.load(_ends(path), mmap_mode="r")


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
        place = np.arange(start, min(start + self.length, len(self.tokens) - 1))
        document = np.searchsorted(self.ends, place, side="right")
        begins = np.maximum(np.where(document > 0, self.ends[document - 1], 0), start)
        last = place + 1 == self.ends[document]
        sample = {
            "tokens": self._padded(self.tokens[place], self.pad),
            "targets": self._padded(np.where(last, IGNORE, self.tokens[place + 1].astype(np.int64)), IGNORE),
            "documents": self._padded(document - document[0], -1),
            "positions": self._padded(place - begins, 0),
        }
        return {name: torch.from_numpy(column) for name, column in sample.items()}

    def _padded(self, column: np.ndarray, fill: int) -> np.ndarray:
        """The last sample may be short: it is filled up with targets that do not count."""
        short = self.length - len(column)
        return np.pad(column.astype(np.int64), (0, short), constant_values=fill)
