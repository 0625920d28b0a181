"""Packing: no place wasted, and no token looks or predicts across a document's edge."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from phalanx import WrongUse
from phalanx.data import PackedTokens, TokenFile, write_tokens
from tests.ranks import Ranks

DOCUMENTS = ["abcde", "", "fg", "h", "ijklmnop"]


def encode(text: str) -> list[int]:
    return [ord(letter) - 96 for letter in text]


def packed(length: int, tmp_path: Path) -> PackedTokens:
    return PackedTokens.of(TokenFile(write_tokens(tmp_path / "t", DOCUMENTS, encode)), length)


@pytest.mark.parametrize("length", [1, 3, 5, 15, 40])
def test_every_prediction_inside_a_document_is_there_once(tmp_path: Path, length: int) -> None:
    data = packed(length, tmp_path)
    pairs = []
    for index in range(len(data)):
        sample = data[index]
        assert all(len(column) == length for column in sample.values())
        kept = sample["targets"] != -100
        pairs += list(zip(sample["tokens"][kept].tolist(), sample["targets"][kept].tolist(), strict=True))
    expected = [pair for text in DOCUMENTS for pair in zip(encode(text), encode(text)[1:], strict=False)]
    assert pairs == expected


def encode_together(folder: Path) -> int:
    documents = (f"document {i}" for i in range(2000))
    path = write_tokens(folder / "corpus", documents, lambda text: list(text.encode()))
    return len(TokenFile(path).tokens)


def test_ranks_that_encode_together_write_once(ranks: Ranks, tmp_path: Path) -> None:
    sizes = ranks(4, encode_together, tmp_path)
    assert set(sizes) == {sum(len(f"document {i}") for i in range(2000))}
    assert write_tokens(tmp_path / "corpus", ["other"], lambda text: [1, 2]) == tmp_path / "corpus"
    assert len(TokenFile(tmp_path / "corpus").tokens) == sizes[0]
    write_tokens(tmp_path / "corpus", ["other"], lambda text: [1, 2], again=True)
    assert len(TokenFile(tmp_path / "corpus").tokens) == 2


def test_documents_and_positions_are_told(tmp_path: Path) -> None:
    sample = packed(10, tmp_path)[0]
    assert sample["documents"].tolist() == [0, 0, 0, 0, 0, 2, 2, 3, 4, 4]
    assert sample["positions"].tolist() == [0, 1, 2, 3, 4, 0, 1, 0, 0, 1]
    later = packed(10, tmp_path)[1]
    assert later["documents"].tolist() == [0] * 5 + [-1] * 5
    assert later["positions"].tolist()[:5] == [0, 1, 2, 3, 4], "begun before, so counted from the sample's start"
    assert later["targets"].tolist()[5:] == [-100] * 5
    with pytest.raises(IndexError):
        packed(10, tmp_path)[2]


def test_token_files_are_memory_mapped_and_checked(tmp_path: Path) -> None:
    file = TokenFile(write_tokens(tmp_path / "deep" / "t", DOCUMENTS, encode))
    assert isinstance(file.tokens, np.memmap)
    assert file.tokens.dtype == np.uint16
    assert file.ends.tolist() == [5, 5, 7, 8, 16]
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["t.ends.npy", "t.tokens.npy"]
    with pytest.raises(WrongUse, match="write_tokens"):
        TokenFile(tmp_path / "nowhere")
    with pytest.raises(WrongUse, match="Use dtype='uint32'"):
        write_tokens(tmp_path / "big", ["a"], lambda text: [70_000])
    with pytest.raises(WrongUse, match="no tokens"):
        write_tokens(tmp_path / "none", [], encode)
    assert (
        TokenFile(write_tokens(tmp_path / "big", ["a"], lambda text: [70_000, 1], dtype="uint32")).tokens[0] == 70_000
    )
    with pytest.raises(WrongUse, match="length=0"):
        PackedTokens(file.tokens, file.ends, 0)
    with pytest.raises(WrongUse, match="ends that reach"):
        PackedTokens(file.tokens, file.ends[:-1], 4)
