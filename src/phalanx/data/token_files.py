"""A folder that ``phalanx tokenize`` made, read where it lies, and samples of one length cut from it.

Shards are memory-mapped when they are first read, so opening a terabyte costs nothing. What is not as the manifest
says is refused: sizes when the folder is opened, ids when they are read, every byte by ``phalanx verify``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
from torch import Tensor

from phalanx.data.packing import packed
from phalanx.data.token_manifest import ENDS, MANIFEST, TokenManifest, ends_in_order
from phalanx.data.tokenizer import Tokenizer
from phalanx.errors import WrongUse


class TokenFiles:
    """The tokens of a folder, one after another, and where its documents end.

    ``tokenizer``: the one that the reader takes them to be from; tokens of another one are refused.
    """

    def __init__(self, folder: str | Path, tokenizer: str | Path | Tokenizer | None = None) -> None:
        self.folder, self.shown = Path(folder), str(folder)
        found = self._manifest()
        if found is None:
            begun = self.folder.with_name(f"{self.folder.name}.unfinished").is_dir()
            more = " It was begun: run the same command again." if begun else ""
            raise WrongUse(f"{self.shown} has no {MANIFEST}. Make it with phalanx tokenize INPUT... OUTPUT.{more}")
        self.manifest = found
        if tokenizer is not None:
            self._check_tokenizer(tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer))
        self.dtype = np.dtype(found.dtype).newbyteorder("<")
        self.starts = np.concatenate([[0], np.cumsum([shard.tokens for shard in found.shards])]).astype(np.int64)
        self._arrays: dict[tuple[int, str], np.ndarray] = {}
        for number in range(len(found.shards)):
            for ending in ("tokens", "ends"):
                self._check_size(number, ending)

    def _manifest(self) -> TokenManifest | None:
        return TokenManifest.read(self.folder)

    def __len__(self) -> int:
        return self.manifest.tokens

    @property
    def vocabulary(self) -> int:
        """How many different ids there may be."""
        return self.manifest.vocabulary

    def window(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens ``start`` to ``stop`` of all, and the ends of documents after ``start`` up to ``stop``, from it."""
        tokens, ends = [], []
        for number, first, last in self._shards(start, stop):
            begin = int(self.starts[number])
            tokens.append(self._tokens(number, first - begin, last - begin))
            own = self._ends(number)
            low, high = np.searchsorted(own, [first - begin, last - begin], side="right")
            ends.append(own[low:high] + (begin - start))
        return np.concatenate(tokens), np.concatenate(ends)

    def document_start(self, place: int) -> int:
        """The last place up to this one at which a document begins."""
        number = int(np.searchsorted(self.starts, place, side="right")) - 1
        begin, own = int(self.starts[number]), self._ends(min(number, len(self.starts) - 2))
        before = int(np.searchsorted(own, place - begin, side="right"))
        return begin + (int(own[before - 1]) if before else 0)

    def _shards(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Which part of which shard these tokens are, counted from the first of all."""
        number = int(np.searchsorted(self.starts, start, side="right")) - 1
        while start < stop:
            last = min(stop, int(self.starts[number + 1]))
            if last > start:
                yield number, start, last
            start, number = last, number + 1

    def _tokens(self, number: int, first: int, last: int) -> np.ndarray:
        found = np.array(self._mapped(number, "tokens", self.dtype)[first:last], dtype=np.int64)
        self._check_ids(number, found)
        return found

    def _ends(self, number: int) -> np.ndarray:
        known = (number, "ends") in self._arrays
        found = self._mapped(number, "ends", ENDS)
        return found if known else self._checked_ends(number, found)

    def _checked_ends(self, number: int, ends: np.ndarray) -> np.ndarray:
        """A shard's ends, the first time they are read."""
        shard = self.manifest.shards[number]
        if not ends_in_order(ends, shard.tokens):
            raise WrongUse(
                f"{self.shown}/{shard.name}.ends has documents that do not end one after another, up to token "
                f"{shard.tokens:,}: the file is damaged. Make it again with phalanx tokenize."
            )
        return ends

    def _mapped(self, number: int, ending: str, dtype: np.dtype) -> np.ndarray:
        if (number, ending) not in self._arrays:
            path = self.folder / f"{self.manifest.shards[number].name}.{ending}"
            size = path.stat().st_size
            self._arrays[number, ending] = np.memmap(path, dtype, "r") if size else np.zeros(0, dtype)
        return self._arrays[number, ending]

    def _check_ids(self, number: int, found: np.ndarray) -> None:
        if len(found) and found.max() >= self.vocabulary:
            name = self.manifest.shards[number].name
            raise WrongUse(
                f"{self.shown}/{name}.tokens has an id {found.max()}, and its tokenizer has {self.vocabulary:,} ids: "
                f"the file is damaged. Look with phalanx verify {self.shown}, and make it again with phalanx tokenize."
            )

    def _check_size(self, number: int, ending: str) -> None:
        shard = self.manifest.shards[number]
        path, wanted = self.folder / f"{shard.name}.{ending}", shard.files[ending].bytes
        size = path.stat().st_size if path.is_file() else -1
        if size != wanted:
            there = f"has {size:,} bytes" if size >= 0 else "is not there"
            raise WrongUse(f"{path} {there}, and had {wanted:,}. Fetch it again, or make it with phalanx tokenize.")

    def _check_tokenizer(self, tokenizer: Tokenizer) -> None:
        if tokenizer.hash != self.manifest.tokenizer:
            made = self.manifest.made["tokenizer"]["name"]
            raise WrongUse(
                f"{self.shown} is made with another tokenizer, {made} of hash {self.manifest.tokenizer[:12]}, and "
                f"{tokenizer.name} has hash {tokenizer.hash[:12]}. Give that one, or tokenize the text again with this."
            )


class PackedFiles:
    """Documents of token files laid end to end and cut into samples of ``length``, as `PackedTokens` are.

    ``start`` and ``stop``: of all tokens only these, so that documents can be kept apart.
    """

    def __init__(self, files: TokenFiles, length: int, start: int = 0, stop: int | None = None) -> None:
        self.files, self.length, self.start = files, length, start
        self.stop = len(files) if stop is None else stop
        if length < 1:
            raise WrongUse(f"length={length} is no length for a sample. Set it to 1 or more.")
        if self.stop - start < 2:
            raise WrongUse(f"{files.folder} has too few tokens to make a sample of. Give more text.")

    def __len__(self) -> int:
        return -(-(self.stop - self.start - 1) // self.length)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        first = self.start + index * self.length
        tokens, ends = self.files.window(first, min(first + self.length + 1, self.stop))
        return packed(tokens, ends, self.length)

    def apart(self, share: float) -> tuple[Self, Self]:
        """The documents to train on, and the last ones with about this share of all tokens to evaluate on.

        Where the last document is far larger than that, its end alone is kept aside.
        """
        wanted = max(2, round(share * (self.stop - self.start)))
        cut = self.files.document_start(self.stop - wanted)
        cut = cut if self.stop - cut <= 2 * wanted else self.stop - wanted
        if not 0 < share < 1 or cut - self.start < 2 or self.stop - cut < 2:
            raise WrongUse(
                f"a share of {share:g} of the documents of {self.files.folder} leaves one part empty. Give a share "
                "between 0 and 1, or more text."
            )
        kind = type(self)
        return kind(self.files, self.length, self.start, cut), kind(self.files, self.length, cut, self.stop)
