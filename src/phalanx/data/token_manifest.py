"""A folder of token files: ``manifest.json`` says what it holds and how it was made, and where it is, all is there.

A shard is two files: ``shard-00000.tokens``, ids one after another, and ``shard-00000.ends``, where each of its
documents ends. Both are little-endian numbers without a header, hashed in blocks so that each can be checked by itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.errors import WrongUse
from phalanx.files import exists
from phalanx.verdict import Verdict

MANIFEST = "manifest.json"
FORMAT = "phalanx tokens 1"
KIND, HEAD = b"phalanx tokens", 100
"""What a manifest of token files says in its first bytes; checkpoints have manifests too."""
BLOCK_BYTES = 4 << 20
ENDS = np.dtype("<i8")

Progress = Callable[[str, int, int], None]
"""Told what is done, and how many bytes of how many."""


@dataclass(frozen=True)
class HashedFile:
    """A file of a shard: how many bytes it has, and a hash of each block of them."""

    bytes: int
    blocks: list[str]


@dataclass(frozen=True)
class ShardRecord:
    """A shard: how many tokens and documents it has, and its two files."""

    name: str
    tokens: int
    documents: int
    files: dict[str, HashedFile]
    """By ending, ``tokens`` and ``ends``."""

    @classmethod
    def parse(cls, found: Mapping[str, Any]) -> ShardRecord:
        files = {name: HashedFile(**each) for name, each in found["files"].items()}
        return cls(str(found["name"]), int(found["tokens"]), int(found["documents"]), files)


@dataclass(frozen=True)
class TokenManifest:
    """What a folder of token files holds."""

    made: dict[str, Any]
    """What it was made from: tokenizer, field, sources. Another such is another folder."""
    dtype: str
    tokens: int
    documents: int
    empty: int
    """Documents without any text, which are left out."""
    bad: int
    bad_rows: list[str]
    """How many bad rows were left out, and the first of them."""
    sources: list[dict[str, Any]]
    shards: list[ShardRecord] = field(default_factory=list)

    @property
    def vocabulary(self) -> int:
        return int(self.made["tokenizer"]["vocabulary"])

    @property
    def tokenizer(self) -> str:
        """The tokenizer's hash."""
        return str(self.made["tokenizer"]["hash"])

    @property
    def end_token(self) -> str:
        """The token that closes each document; empty if none does."""
        return str(self.made["tokenizer"]["end"])

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "block_bytes": BLOCK_BYTES, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def parse(cls, content: bytes, where: str) -> TokenManifest:
        try:
            found = json.loads(content)
            if found.pop("format") != FORMAT or found.pop("block_bytes") != BLOCK_BYTES:
                raise ValueError("it is of another version")
            found["shards"] = [ShardRecord.parse(each) for each in found["shards"]]
            return cls(**found)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            advice = "Make the folder again with phalanx tokenize."
            raise WrongUse(f"{where} is no manifest of token files that can be read ({error}). {advice}") from None

    @classmethod
    def read(cls, folder: Path) -> TokenManifest | None:
        """Of a folder; None where there is none."""
        path = folder / MANIFEST
        return cls.parse(path.read_bytes(), str(path)) if path.is_file() else None


class BlockHash:
    """Hashes of a file's blocks, made while it is written."""

    def __init__(self) -> None:
        self.bytes, self._open = 0, hashlib.sha256()
        self._blocks: list[str] = []

    def update(self, content: memoryview) -> None:
        while len(content):
            room = BLOCK_BYTES - self.bytes % BLOCK_BYTES
            self._open.update(content[:room])
            self.bytes += len(content[:room])
            content = content[room:]
            if self.bytes % BLOCK_BYTES == 0:
                self._close()

    def _close(self) -> None:
        self._blocks.append(self._open.hexdigest()[:32])
        self._open = hashlib.sha256()

    def done(self) -> HashedFile:
        if self.bytes % BLOCK_BYTES:
            self._close()
        return HashedFile(self.bytes, self._blocks)


def block_hash(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def damages(folder: Path, manifest: TokenManifest, progress: Progress | None = None) -> Iterator[str]:
    """What is not as the manifest says, every byte read."""
    total = sum(file.bytes for shard in manifest.shards for file in shard.files.values())
    done = 0
    for shard in manifest.shards:
        for ending, known in shard.files.items():
            path = folder / f"{shard.name}.{ending}"
            if not path.is_file() or path.stat().st_size != known.bytes:
                there = f"{path.stat().st_size:,} bytes" if path.is_file() else "not there"
                yield f"{path} is {there}, and was {known.bytes:,} bytes"
                done += known.bytes
                continue
            with path.open("rb") as file:
                for number, wanted in enumerate(known.blocks):
                    content = file.read(BLOCK_BYTES)
                    if block_hash(content) != wanted:
                        first = number * BLOCK_BYTES
                        yield f"{path} is not what was written, between bytes {first:,} and {first + len(content):,}"
                    done += len(content)
                    if progress is not None:
                        progress(f"verifying {shard.name}", done, total)


def verify_tokens(folder: Path, progress: Progress | None = None) -> Verdict | None:
    """Whether a folder of token files is whole; None if it is none."""
    path = folder / MANIFEST
    manifest = TokenManifest.read(folder) if exists(path) and KIND in path.read_bytes()[:HEAD] else None
    if manifest is None:
        return None
    found = list(damages(folder, manifest, progress))
    what = f"{manifest.tokens:,} tokens of {manifest.documents:,} documents in {len(manifest.shards)} shards"
    if found:
        return Verdict(False, f"{folder} is damaged", found, next="Make it again with phalanx tokenize.")
    return Verdict(True, f"{folder} is whole: {what}")
