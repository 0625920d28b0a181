"""A folder of token files: ``manifest.json`` says what it holds and how it was made, and where it is, all is there.

A shard is two files: ``shard-00000.tokens``, ids one after another, and ``shard-00000.ends``, where each of its
documents ends. Both are little-endian numbers without a header, hashed in blocks so that each can be checked by itself.
The manifest has a hash of itself, and nothing of it is used before it was checked here.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.errors import WrongUse
from phalanx.folder_files import left_out, reading
from phalanx.schema import Check, anything, each, is_count, is_text, maybe, record, short, table
from phalanx.verdict import Verdict

MANIFEST = "manifest.json"
FORMAT, OLDER = "phalanx tokens 2", "phalanx tokens 1"
"""The older one has no hash of itself."""
KIND, HEAD = b"phalanx tokens", 100
"""What a manifest of token files says in its first bytes; checkpoints have manifests too."""
BLOCK_BYTES = 4 << 20
ENDS = np.dtype("<i8")
DTYPES = ("uint16", "uint32")
SHARD, HASH = re.compile(r"shard-\d{5,9}"), re.compile(r"[0-9a-f]{32}")
ADVICE = "Make the folder again with phalanx tokenize."

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
        """Of what was read; ValueError for what is no shard."""
        if not _is_shard(found):
            raise ValueError(f"a shard is {short(found)}")
        files = {name: HashedFile(**file) for name, file in found["files"].items()}
        return cls(found["name"], found["tokens"], found["documents"], files)

    def check(self, dtype: np.dtype) -> None:
        """Whether its files have as many bytes, and these as many hashes, as its counts say."""
        for ending, wanted in (("tokens", self.tokens * dtype.itemsize), ("ends", self.documents * ENDS.itemsize)):
            file = self.files[ending]
            if file.bytes != wanted or len(file.blocks) != -(-wanted // BLOCK_BYTES):
                raise ValueError(f"{self.name}.{ending} has {file.bytes:,} bytes, and its counts say {wanted:,}")


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
    hashed: bool = field(default=True, compare=False)
    """Whether it has a hash of itself."""

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
        found = {"format": FORMAT, "block_bytes": BLOCK_BYTES, **asdict(self)}
        del found["hashed"]
        return json.dumps(found | {"hash": _hash_of(found)}, indent=1) + "\n"

    @classmethod
    def parse(cls, content: bytes, where: str) -> TokenManifest:
        """From a file's content; what makes no sense is refused."""
        try:
            return cls._parsed(json.loads(content))
        except RecursionError:
            why = "it is nested too deep"
        except (ValueError, TypeError) as error:
            why = str(error)
        raise WrongUse(f"{where} is no manifest of token files that can be read ({why}). {ADVICE}")

    @classmethod
    def _parsed(cls, found: Any) -> TokenManifest:
        if not isinstance(found, dict) or found.get("format") not in (FORMAT, OLDER):
            raise ValueError("it is of another version")
        hashed = found["format"] == FORMAT
        if hashed and found.pop("hash", None) != _hash_of(found):
            raise ValueError("it has changed since it was written")
        for name, check in KEYS.items():
            if not check(found.get(name)):
                raise ValueError(f"{name} is {short(found.get(name))}")
        if other := found.keys() - KEYS.keys():
            raise ValueError(f"it says {short(min(other))}, which means nothing")
        shards = [ShardRecord.parse(each) for each in found["shards"]]
        for shard in shards:
            shard.check(np.dtype(found["dtype"]))
        for name in ("tokens", "documents"):
            if sum(getattr(shard, name) for shard in shards) != found[name]:
                raise ValueError(f"its shards do not have {found[name]:,} {name} together")
        if len({shard.name for shard in shards}) != len(shards):
            raise ValueError("it has a shard twice")
        kept = {name: value for name, value in found.items() if name not in ("format", "block_bytes")}
        return cls(**kept | {"shards": shards, "hashed": hashed})

    @classmethod
    def read(cls, folder: Path) -> TokenManifest | None:
        """Of a folder; None where there is none."""
        path = folder / MANIFEST
        return cls.parse(path.read_bytes(), str(path)) if path.is_file() else None


def _hash_of(found: Mapping[str, Any]) -> str:
    """Of all that a manifest says, however it is laid out."""
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:32]


_is_file = record({"bytes": is_count, "blocks": each(lambda value: is_text(value) and bool(HASH.fullmatch(value)))})
_is_shard = record(
    {
        "name": lambda value: is_text(value) and bool(SHARD.fullmatch(value)),
        "tokens": is_count,
        "documents": is_count,
        "files": record({"tokens": _is_file, "ends": _is_file}),
    }
)
_TOKENIZER: dict[str, Check] = {
    "name": is_text, "hash": is_text, "vocabulary": lambda value: is_count(value) and 0 < value <= 1 << 32,
    "end": maybe(is_text),
}  # fmt: skip


def _is_made(value: Any) -> bool:
    return isinstance(value, dict) and record(_TOKENIZER)(value.get("tokenizer"))


KEYS: dict[str, Check] = {
    "format": is_text,
    "block_bytes": lambda value: value == BLOCK_BYTES,
    "made": _is_made,
    "dtype": lambda value: value in DTYPES,
    "tokens": is_count,
    "documents": is_count,
    "empty": is_count,
    "bad": is_count,
    "bad_rows": each(is_text),
    "sources": each(table(anything)),
    "shards": each(_is_shard),
}
"""What a manifest says, and which values each of it may have."""


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


def _unordered(folder: Path, manifest: TokenManifest) -> Iterator[str]:
    """Shards whose documents do not end one after another, the last one at the last token."""
    for shard in manifest.shards:
        path = folder / f"{shard.name}.ends"
        if not ends_in_order(np.fromfile(path, ENDS), shard.tokens):
            yield f"{path} has documents that do not end one after another, up to token {shard.tokens:,}"


def ends_in_order(ends: np.ndarray, tokens: int) -> bool:
    """Whether documents end one after another, the last one at the last of so many tokens."""
    steps = np.diff(ends.astype(np.int64), prepend=0)
    return bool((steps >= 0).all()) and (int(ends[-1]) if len(ends) else 0) == tokens


def verify_tokens(folder: Path, progress: Progress | None = None) -> Verdict | None:
    """Whether a folder of token files is whole; None if it is none."""
    head = b""
    with left_out(), reading(folder, folder / MANIFEST) as file:
        head = file.read(HEAD)
    manifest = TokenManifest.read(folder) if KIND in head else None
    if manifest is None:
        return None
    found = list(damages(folder, manifest, progress))
    found += [] if found else list(_unordered(folder, manifest))
    what = f"{manifest.tokens:,} tokens of {manifest.documents:,} documents in {len(manifest.shards)} shards"
    if found:
        return Verdict(False, f"{folder} is damaged", found, next="Make it again with phalanx tokenize.")
    older = "note: an older version wrote its manifest, without a hash of that itself"
    return Verdict(True, f"{folder} is whole: {what}", [] if manifest.hashed else [older])
