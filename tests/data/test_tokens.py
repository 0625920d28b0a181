"""Packing: no place wasted, and no token looks or predicts across a document's edge."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx import WrongUse
from phalanx.data import PackedTokens, TokenFile, tokens, write_tokens
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
    write_tokens(tmp_path / "corpus", ["other"], lambda text: [1, 2], again=True)
    assert len(TokenFile(tmp_path / "corpus").tokens) == 2


OTHERS = {
    "more documents": ([*DOCUMENTS, "more"], encode, "uint16", "made from 5 documents, and there are 6"),
    "fewer": (DOCUMENTS[:-1], encode, "uint16", "made from 5 documents, and there are 4"),
    "the last one edited": ([*DOCUMENTS[:-1], "zzzzzzzz"], encode, "uint16", "made from other documents"),
    "another encoding": (DOCUMENTS, lambda text: [n + 1 for n in encode(text)], "uint16", "document 0 is encoded as"),
    "another dtype": (DOCUMENTS, encode, "uint32", "it holds uint16, and uint32 is asked for"),
}


@pytest.mark.parametrize("once", [False, True], ids=["a list", "a generator"])
@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_other_documents_or_tokens_is_written_anew_and_that_is_said(
    name: str, once: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def given(documents: list[str]) -> Iterable[str]:
        return (text for text in documents) if once else documents

    write_tokens(tmp_path / "t", given(DOCUMENTS), encode)
    before = (tmp_path / "t.tokens.npy").stat().st_ino
    write_tokens(tmp_path / "t", given(DOCUMENTS), encode)
    assert (tmp_path / "t.tokens.npy").stat().st_ino == before, "it was kept"
    assert not capsys.readouterr().err
    opened = TokenFile(tmp_path / "t").tokens
    documents, encoding, dtype, words = OTHERS[name]
    write_tokens(tmp_path / "t", given(documents), encoding, dtype)
    told = capsys.readouterr().err
    assert f"{tmp_path / 't'} is written anew: " in told
    assert words in told
    assert opened.tolist() == [token for text in DOCUMENTS for token in encode(text)], "who has it open keeps it"
    assert TokenFile(tmp_path / "t").tokens.tolist() == [token for text in documents for token in encoding(text)]
    assert TokenFile(tmp_path / "t").tokens.dtype == dtype


LETTERS = "abcdefghij" * 11


def test_of_many_documents_the_first_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tokens, "WHOLE", 10)
    write_tokens(tmp_path / "t", (LETTERS[i] for i in range(100)), encode)
    taken = iter(LETTERS[i] for i in range(100))
    write_tokens(tmp_path / "t", taken, encode)
    assert next(taken) == LETTERS[16], "no more were read"
    write_tokens(tmp_path / "t", (LETTERS[i + 1] for i in range(100)), encode)
    assert "document 0 is encoded as other tokens" in capsys.readouterr().err
    assert len(TokenFile(tmp_path / "t").ends) == 100


def test_what_an_older_version_wrote_is_looked_at_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tokens(tmp_path / "t", DOCUMENTS, encode)
    (tmp_path / "t.from.json").unlink()
    write_tokens(tmp_path / "t", DOCUMENTS, encode)
    assert not capsys.readouterr().err
    write_tokens(tmp_path / "t", ["other", *DOCUMENTS[1:]], encode)
    assert "document 0 is encoded as other tokens" in capsys.readouterr().err


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
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["t.ends.npy", "t.from.json", "t.tokens.npy"]
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


@pytest.mark.parametrize(
    ("ending", "holds", "words"),
    [
        ("tokens", b"no array", "is no array of numbers"),
        ("tokens", b"", "is no array of numbers"),
        ("tokens", np.array([1.5, 2.5]), "does not hold whole numbers in a row"),
        ("tokens", np.array([[1, 2], [3, 4]]), "does not hold whole numbers in a row"),
        ("tokens", np.array([1, 2, 3]), "one of them is another's, or damaged"),
        ("ends", np.array([16, 5]), "one of them is another's, or damaged"),
        ("ends", np.array(["a"]), "does not hold whole numbers in a row"),
        ("ends", np.array([{}], dtype=object), "is no array of numbers"),
    ],
)
def test_a_file_that_is_none_is_refused_and_written_anew(ending: str, holds: Any, words: str, tmp_path: Path) -> None:
    write_tokens(tmp_path / "t", DOCUMENTS, encode)
    expected = TokenFile(tmp_path / "t").tokens.tolist()
    path = tmp_path / f"t.{ending}.npy"
    path.write_bytes(holds) if isinstance(holds, bytes) else np.save(path, holds, allow_pickle=True)
    with pytest.raises(WrongUse, match=words):
        TokenFile(tmp_path / "t")
    write_tokens(tmp_path / "t", DOCUMENTS, encode)
    assert TokenFile(tmp_path / "t").tokens.tolist() == expected
