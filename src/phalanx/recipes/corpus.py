"""Text to train on: folders that ``phalanx tokenize`` made, or files of text, which are tokenized once into a cache.

Without any of these, Python's own standard library is the text.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Self

import phalanx
from phalanx.data import Joined, Mixture, PackedFiles, TokenFiles
from phalanx.data.rows import files_of, rows
from phalanx.data.token_folder import tokenize
from phalanx.data.token_manifest import MANIFEST, TokenManifest
from phalanx.data.tokenizer import FILE, Tokenizer, train_tokenizer
from phalanx.processes import aside
from phalanx.run import held

PATIENCE = 3600.0
"""Seconds that ranks wait for the one of them that tokenizes."""
LEARNT_FROM = 1 << 20
"""Characters that a small tokenizer is trained on."""


@dataclass
class Corpus(phalanx.Task):
    """A language model on text: where that is, how it is cut into tokens and samples, and which of it is held out.

    ``config``: a Hugging Face configuration to build the model from, instead of ours.
    """

    width: int = 128
    layers: int = 4
    heads: int = 4
    dropout: float = 0.0
    config: str = ""
    sources: tuple[str, ...] = ()
    weights: tuple[float, ...] | dict[str, tuple[float, ...]] = ()
    tokenizer: str = ""
    vocabulary: int = 1024
    length: int = 128
    megabytes: float = 2.0
    held_out_share: float = 0.05
    held_out_tokens: int = 1 << 16
    cache: str = ""

    counts = "tokens"
    special: ClassVar[Sequence[str]] = ()
    """Tokens that a small tokenizer has besides."""

    def tiny(self) -> Self:
        return dataclasses.replace(
            self, width=8 * self.heads, layers=min(self.layers, 2), length=min(self.length, 12), megabytes=0.2,
            vocabulary=min(self.vocabulary, 300),
        )  # fmt: skip

    def logits(self, output: Any) -> Any:
        return output.logits if self.config else output

    def loss(self, output: Any, batch: dict[str, Any]) -> phalanx.Loss:
        return phalanx.losses.cross_entropy(self.logits(output), batch["targets"], dim=-1)

    def data(self) -> Any:
        parts = {name: self._parts(files)[0] for name, files in self._files.items()}
        if len(parts) == 1:
            return next(iter(parts.values()))
        return Mixture(parts, self.weights, self.steps)

    def held_out(self) -> Any:
        return Joined({name: self._parts(files)[1] for name, files in self._files.items()})

    def by_source(self, loss: Callable[[Any], phalanx.Loss], batch: dict[str, Any]) -> dict[str, phalanx.Loss]:
        """A loss over all held-out targets and, where there are several sources, over those of each."""
        found, targets = {"loss": loss(batch["targets"])}, batch["targets"]
        if len(self._files) > 1:
            for number, name in enumerate(self._files):
                own = (batch["source"] == number).unsqueeze(1)
                found[f"loss_{name}"] = loss(targets.where(own, -100))
        return found

    def check(self) -> None:
        super().check()
        several = len(self.sources) > 1
        if self.weights and not several:
            raise phalanx.WrongUse(f"weights={self.weights} has no effect with one source. Name several in sources.")

    @cached_property
    def known_tokenizer(self) -> Tokenizer:
        """The tokenizer of all sources: the one that is given, the token files' own, or a small one trained here."""
        found, manifests = Tokenizer.load(self._tokenizer_name), map(TokenManifest.read, map(Path, self.sources))
        made = next((each for each in manifests if each is not None), None)
        if made is None or made.tokenizer != found.hash:
            return found
        return Tokenizer.load(self._tokenizer_name, made.end_token)  # documents of all sources end alike

    @cached_property
    def _files(self) -> dict[str, TokenFiles]:
        """By source, its token files."""
        found: dict[str, TokenFiles] = {}
        for source in self.sources or ("library",):
            path = Path(source)
            folder = path if (path / MANIFEST).is_file() else self._tokenized(self._texts(source))
            name = path.name.partition(".")[0] or "source"
            found[name if name not in found else f"{name}_{len(found)}"] = TokenFiles(folder, self.known_tokenizer)
        return found

    def _parts(self, files: TokenFiles) -> tuple[PackedFiles, PackedFiles]:
        train, held_out = PackedFiles(files, self.length).apart(self.held_out_share)
        stop = min(held_out.stop, held_out.start + max(2, self.held_out_tokens))
        return train, PackedFiles(files, self.length, held_out.start, stop)

    def _texts(self, source: str) -> list[Path]:
        if self.sources:
            return files_of([source])
        files, limit = [], self.megabytes * 1e6
        for path in standard_library():
            if limit > 0 and path.stat().st_size:
                files.append(path)
                limit -= path.stat().st_size
        if len(files) < 2:
            raise phalanx.WrongUse(f"megabytes={self.megabytes} is less than two files of text. Set it higher.")
        return files

    def _tokenized(self, files: Sequence[Path]) -> Path:
        """The folder of these files' tokens, made by the first process that asks; others wait for it."""
        model = self.known_tokenizer
        folder = self._cache / f"tokens-{_key(files, f'{model.hash} {model.end_token}')}"
        if not (folder / MANIFEST).is_file():
            folder.parent.mkdir(parents=True, exist_ok=True)
            # threads of a tokenizer do not survive a fork
            aside(partial(_encode, files, folder, self._tokenizer_name, model.end_token))
        return folder

    @cached_property
    def _tokenizer_name(self) -> str:
        if self.tokenizer:
            return self.tokenizer
        folders = [path for path in map(Path, self.sources) if (path / MANIFEST).is_file()]
        if not folders:
            return str(self._small_tokenizer())
        return str(folders[0]) if (folders[0] / FILE).is_file() else "bytes"

    def _small_tokenizer(self) -> Path:
        """A small byte-level BPE, trained on the first text of each source."""
        if self.vocabulary < 256 + len(self.special):
            least = 256 + len(self.special)
            raise phalanx.WrongUse(f"vocabulary={self.vocabulary} is less than all bytes. Set it to {least} or more.")
        sources = [self._texts(source) for source in self.sources or ("library",)]
        files = [path for each in sources for path in each]
        folder = self._cache / f"bpe-{_key(files, f'{self.vocabulary} {list(self.special)}')}"
        folder.mkdir(parents=True, exist_ok=True)
        with held(folder, PATIENCE):
            if not (folder / FILE).is_file():
                texts = [text for each in sources for text in _first_texts(each, LEARNT_FROM // len(sources))]
                train_tokenizer(texts, self.vocabulary, folder, self.special)
        return folder

    @property
    def _cache(self) -> Path:
        known = os.environ.get("XDG_CACHE_HOME")
        return Path(self.cache) if self.cache else Path(known or Path.home() / ".cache") / "phalanx"


def standard_library() -> list[Path]:
    """Python's own modules, and those of its packages, in the order of their names; each once, whatever leads to it."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found = sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py"))
    each: dict[Path, Path] = {}
    for path in found:
        if "site-packages" not in path.parts:
            each.setdefault(path.resolve(), path)
    return list(each.values())


def _encode(files: Sequence[Path], folder: Path, tokenizer: str, end: str) -> None:
    tokenize(files, folder, tokenizer, end=end, workers=0, patience=PATIENCE)


def _key(files: Sequence[Path], more: str) -> str:
    known = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps([known, more]).encode()).hexdigest()[:16]


def _first_texts(files: Sequence[Path], most: float) -> list[str]:
    """Texts of so many characters, or a little more."""
    found, left = [], most if most > 0 else math.inf
    for path in files:
        for row in rows(path, bad=lambda wrong: None):
            text = row.values.get("text")
            if isinstance(text, str) and left > 0:
                found.append(text[: int(left)])
                left -= len(found[-1])
            if left <= 0:
                return found
    return found
