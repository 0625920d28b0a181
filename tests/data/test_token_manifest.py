"""The manifest of token files: it reads back as it was written, and hashes are by block."""

from __future__ import annotations

import pytest

from phalanx import WrongUse
from phalanx.data import token_manifest
from phalanx.data.token_manifest import BlockHash, HashedFile, ShardRecord, TokenManifest, block_hash


def test_it_reads_back() -> None:
    shard = ShardRecord("shard-00000", 3, 1, {"tokens": HashedFile(6, ["a"]), "ends": HashedFile(8, ["b"])})
    made = {"tokenizer": {"name": "bytes", "hash": "x", "vocabulary": 256}}
    manifest = TokenManifest(made, "uint16", 3, 1, 0, 0, [], [{"name": "a"}], [shard])
    assert TokenManifest.parse(manifest.to_json().encode(), "here") == manifest
    for content in (b"{", b"[]", b'{"format": "phalanx tokens 1"}', b'{"format": "other"}'):
        with pytest.raises(WrongUse, match="here is no manifest"):
            TokenManifest.parse(content, "here")


def test_blocks_are_hashed_however_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_manifest, "BLOCK_BYTES", 4)
    content = b"0123456789"
    for pieces in ([content], [content[:3], content[3:]], [content[i : i + 1] for i in range(10)]):
        found = BlockHash()
        for piece in pieces:
            found.update(memoryview(piece))
        assert found.done() == HashedFile(10, [block_hash(content[i : i + 4]) for i in (0, 4, 8)])
