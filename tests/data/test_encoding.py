"""One part encoded: long texts are cut after lines, and what was left torn is encoded again."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.data import encoding, rows
from phalanx.data.encoding import Encoder, pieces
from phalanx.data.rows import FilePart
from phalanx.data.tokenizer import Tokenizer


def test_long_texts_are_cut_after_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "TOGETHER", 10)
    for text in ("", "short", "line\n" * 30, "x" * 35 + "\n" + "y" * 3, "line\n\n" * 7 + "no end"):
        found = pieces(text)
        assert "".join(found) == text
        assert all(len(piece) <= 10 for piece in found)
    assert pieces("line\n" * 3) == ["line\nline\n", "line\n"]


def test_rows_before_a_part_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, opened = tmp_path / "a.jsonl", []
    path.write_text('{"text": "good"}\n' + '{"text": 3}\n{"text": \n' * 20)
    known = rows.opened
    monkeypatch.setattr(rows, "opened", lambda path: opened.append(path) or known(path))
    record = Encoder(Tokenizer.load("bytes"), [FilePart(path, 17)], "text", True, tmp_path).encode(0)
    assert record.bad_rows[-2].startswith("a.jsonl, row 40: 'text' is a int")
    assert record.bad_rows[-1].startswith("a.jsonl, row 41: it is not JSON")
    assert len(opened) == 2, "for the rows themselves, and for those before them"


def test_a_part_that_is_torn_is_encoded_again(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text\n")
    encoder = Encoder(Tokenizer.load("bytes"), [FilePart(tmp_path / "a.txt")], "text", False, tmp_path)
    assert encoder.known(0) is None
    record = encoder.encode(0)
    assert encoder.known(0) == record
    encoder.path(0, "tokens").write_bytes(b"torn")
    tokens, ends = encoder.arrays(0)
    assert bytes(tokens.astype("u1")) == b"some text\n"
    assert ends.tolist() == [10]
    encoder.forget(0)
    assert encoder.known(0) is None
