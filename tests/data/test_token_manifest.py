"""The manifest of token files: it reads back as it was written, what makes no sense is refused, hashes are by block."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx import WrongUse
from phalanx.data import TokenFiles, token_manifest, tokenize
from phalanx.data.token_manifest import (
    KEYS,
    BlockHash,
    HashedFile,
    ShardRecord,
    TokenManifest,
    block_hash,
    ends_in_order,
    verify_tokens,
)
from tests.damage import ODD, written

HASH = 32 * "a"
REFUSED = r"^here is no manifest of token files that can be read \(.*\)\. Make .*\.$"


def made() -> TokenManifest:
    files = {"tokens": HashedFile(6, [HASH]), "ends": HashedFile(8, [HASH])}
    tokenizer = {"name": "bytes", "hash": "x", "vocabulary": 256, "end": ""}
    shard = ShardRecord("shard-00000", 3, 1, files)
    return TokenManifest({"tokenizer": tokenizer}, "uint16", 3, 1, 0, 0, [], [{"name": "a"}], [shard])


def test_it_reads_back() -> None:
    manifest = made()
    assert TokenManifest.parse(manifest.to_json().encode(), "here") == manifest
    for content in (b"{", b"[]", b'{"format": "phalanx tokens 1"}', b'{"format": "other"}'):
        with pytest.raises(WrongUse, match="here is no manifest"):
            TokenManifest.parse(content, "here")


@pytest.mark.parametrize("name", ODD)
def test_what_is_no_object_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(WrongUse, match=REFUSED):
        TokenManifest.parse(written(name), "here")


def older(change: Callable[[dict[str, Any]], object]) -> bytes:
    """As an older version wrote it, without a hash of itself: whoever forges it need not make one."""
    found = json.loads(made().to_json())
    found["format"] = "phalanx tokens 1"
    del found["hash"]
    change(found)
    return json.dumps(found).encode()


def of_shard(**changed: Any) -> Callable[[dict[str, Any]], None]:
    return lambda found: found["shards"][0].update(changed)


def of_file(**changed: Any) -> Callable[[dict[str, Any]], None]:
    return lambda found: found["shards"][0]["files"]["tokens"].update(changed)


def of_tokenizer(**changed: Any) -> Callable[[dict[str, Any]], None]:
    return lambda found: found["made"]["tokenizer"].update(changed)


FORGED = {
    "far too many tokens": lambda found: found.update(tokens=10**15),
    "negative tokens": lambda found: found.update(tokens=-5),
    "as many in a shard": of_shard(tokens=10**15),
    "negative in a shard": of_shard(tokens=-5),
    "objects": lambda found: found.update(dtype="O"),
    "another dtype": lambda found: found.update(dtype="uint32"),
    "a dtype that is none": lambda found: found.update(dtype=["uint16"]),
    "a shard elsewhere": of_shard(name="../../outside/data"),
    "an absolute shard": of_shard(name="/etc/passwd"),
    "a shard twice": lambda found: (found["shards"].append(found["shards"][0]), found.update(tokens=6, documents=2)),
    "no shards": lambda found: found.update(shards=[]),
    "shards that are none": lambda found: found.update(shards=[7]),
    "a shard without ends": lambda found: found["shards"][0]["files"].pop("ends"),
    "a third file": lambda found: found["shards"][0]["files"].update({"../x": {"bytes": 0, "blocks": []}}),
    "other bytes": of_file(bytes=8),
    "bytes that are none": of_file(bytes="6"),
    "no hashes": of_file(blocks=[]),
    "a hash elsewhere": of_file(blocks=["../../cache/secret"]),
    "more documents": lambda found: found.update(documents=2),
    "blocks of another size": lambda found: found.update(block_bytes=1),
    "no vocabulary": of_tokenizer(vocabulary=0),
    "a vocabulary that is none": of_tokenizer(vocabulary=1e3),
    "a tokenizer that is none": lambda found: found.update(made={"tokenizer": "bytes"}),
    "nothing it was made from": lambda found: found.update(made=[]),
    "bad rows that are none": lambda found: found.update(bad_rows=7),
    "sources that are none": lambda found: found.update(sources=["a"]),
    "more than is known": lambda found: found.update(more=1),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_what_makes_no_sense_is_refused(name: str) -> None:
    content = older(FORGED[name])
    with pytest.raises(WrongUse, match=REFUSED) as found:
        TokenManifest.parse(content, "here")
    assert len(str(found.value)) < 300


def test_every_key_must_be_there() -> None:
    for key in KEYS:
        with pytest.raises(WrongUse, match="here is no manifest of token files"):
            TokenManifest.parse(older(lambda found, key=key: found.pop(key)), "here")


def test_every_change_is_noticed() -> None:
    """But of spaces, which mean nothing."""
    content = made().to_json().encode()
    found = json.loads(content)
    assert TokenManifest.parse(json.dumps(found).encode(), "here") == made()
    for place in range(0, len(content), 3):
        spoiled = content[:place] + bytes([content[place] ^ 2]) + content[place + 1 :]
        try:
            same = json.loads(spoiled) == found
        except ValueError:
            same = False
        if not same:
            with pytest.raises(WrongUse, match="here is no manifest"):
                TokenManifest.parse(spoiled, "here")
    found["made"]["tokenizer"]["end"] = "<end>"
    with pytest.raises(WrongUse, match="it has changed since it was written"):
        TokenManifest.parse(json.dumps(found).encode(), "here")


def test_what_an_older_version_wrote_is_read_with_a_word(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    tokenize([tmp_path / "a.txt"], folder := tmp_path / "out", "bytes", workers=0)
    verdict = verify_tokens(folder)
    assert verdict is not None
    assert (verdict.holds, verdict.evidence) == (True, [])
    found = json.loads((folder / "manifest.json").read_text())
    del found["hash"]
    (folder / "manifest.json").write_text(json.dumps(found | {"format": "phalanx tokens 1"}))
    assert len(TokenFiles(folder)) == 9
    assert "an older version wrote its manifest, without a hash of that itself" in str(verify_tokens(folder))


def test_documents_end_one_after_another(tmp_path: Path) -> None:
    assert ends_in_order(np.array([1, 1, 3]), 3)
    assert ends_in_order(np.array([], np.int64), 0)
    for wrong in ([3, 1], [1, 2], [-1, 3], [4, 3]):
        assert not ends_in_order(np.array(wrong), 3)
    assert not ends_in_order(np.array([2, 1, 3], np.uint64), 3)


def test_blocks_are_hashed_however_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_manifest, "BLOCK_BYTES", 4)
    content = b"0123456789"
    for pieces in ([content], [content[:3], content[3:]], [content[i : i + 1] for i in range(10)]):
        found = BlockHash()
        for piece in pieces:
            found.update(memoryview(piece))
        assert found.done() == HashedFile(10, [block_hash(content[i : i + 4]) for i in (0, 4, 8)])
