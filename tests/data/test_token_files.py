"""Token files: the samples of one folder in many shards are those of one array; what is wrong with it is said."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from phalanx import WrongUse
from phalanx.data import PackedFiles, PackedTokens, TokenFiles, tokenize

TEXTS = [f"document {i}" * (i % 4 + 1) for i in range(40)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    found = tokenize([tmp_path / "a.jsonl"], tmp_path / "out", "bytes", workers=0, part_bytes=200, shard_tokens=150)
    assert len(found.shards) > 4
    return tmp_path / "out"


@pytest.mark.parametrize("length", [1, 7, 64, 5000])
def test_samples_are_those_of_one_array(folder: Path, length: int) -> None:
    content = "".join(TEXTS).encode()
    whole = PackedTokens(np.frombuffer(content, np.uint8), np.cumsum([len(text) for text in TEXTS]), length)
    files = PackedFiles(TokenFiles(folder, "bytes"), length)
    assert len(files) == len(whole)
    for index in range(0, len(whole), max(1, len(whole) // 40)):
        for name, column in whole[index].items():
            assert torch.equal(files[index][name], column), (index, name)
    with pytest.raises(IndexError):
        files[len(files)]


def test_documents_are_kept_apart(folder: Path) -> None:
    train, held = PackedFiles(TokenFiles(folder), 16).apart(0.2)
    assert train.stop == held.start
    _, ends = train.files.window(0, train.stop)
    assert ends[-1] == train.stop, "it is cut where a document ends"
    assert 0.15 < (held.stop - held.start) / len(train.files) < 0.35
    assert held[0]["positions"][0] == 0
    with pytest.raises(WrongUse, match="leaves one part empty"):
        PackedFiles(TokenFiles(folder), 16).apart(1.0)


def test_what_is_wrong_with_a_folder_is_said(folder: Path, tmp_path: Path) -> None:
    shard = folder / "shard-00002.tokens"
    content = shard.read_bytes()
    shard.write_bytes(content[:-2] + b"\xff\xff")
    samples = PackedFiles(TokenFiles(folder), 64)
    with pytest.raises(WrongUse, match=r"shard-00002\.tokens has an id 65535, and its tokenizer has 256 ids"):
        [samples[index] for index in range(len(samples))]
    shard.write_bytes(content)
    ends = np.fromfile(folder / "shard-00002.ends", "<i8")
    for wrong in (ends[::-1], ends - 1):
        wrong.tofile(folder / "shard-00002.ends")
        samples = PackedFiles(TokenFiles(folder), 64)
        with pytest.raises(WrongUse, match=r"shard-00002\.ends has documents that do not end one after another"):
            [samples[index] for index in range(len(samples))]
    ends.tofile(folder / "shard-00002.ends")
    shard.write_bytes(content[:-2])
    with pytest.raises(WrongUse, match=r"has [\d,]+ bytes, and had"):
        TokenFiles(folder)
    with pytest.raises(WrongUse, match="Make it with phalanx tokenize"):
        TokenFiles(tmp_path)
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace("phalanx tokens 2", "phalanx tokens 9"))
    with pytest.raises(WrongUse, match="of another version"):
        TokenFiles(folder)


def test_tokens_of_another_tokenizer_are_refused(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="no tokenizers (pip install 'phalanx[tokenizers]')")
    from phalanx.data.tokenizer import train_tokenizer

    with pytest.raises(WrongUse, match="made with another tokenizer, bytes of hash"):
        TokenFiles(folder, train_tokenizer(TEXTS, 270, tmp_path / "bpe"))
