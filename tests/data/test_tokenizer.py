"""Tokenizers by name: what they encode comes back, the same one has the same hash, and what is none is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from phalanx import WrongUse
from phalanx.data.tokenizer import CONFIG, FILE, Tokenizer, train_tokenizer
from tests.damage import ODD, written

TEXTS = ["the quick brown fox", "jumps over the lazy dog — é", ""]


def test_bytes_are_bytes() -> None:
    model = Tokenizer.load("bytes")
    assert [model.decode(ids) for ids in model.encode(TEXTS)] == TEXTS
    assert (model.vocabulary, model.dtype, model.end) == (256, np.uint16, None)
    with pytest.raises(WrongUse, match="Leave --end out"):
        Tokenizer.load("bytes", end="<end>")


def test_a_file_is_known_by_what_it_says(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="no tokenizers (pip install 'phalanx[tokenizers]')")
    folder = train_tokenizer(TEXTS * 9, 280, tmp_path / "bpe", ["<end>"])
    again = train_tokenizer(TEXTS * 9, 280, tmp_path / "again", ["<end>"])
    assert (folder / FILE).read_bytes() == (again / FILE).read_bytes()
    model = Tokenizer.load(folder)
    assert (model.end, model.vocabulary <= 280) == (None, True)
    assert [model.decode(ids) for ids in model.encode(TEXTS)] == TEXTS

    content = json.loads((folder / FILE).read_bytes())
    (again / FILE).write_text(json.dumps(content, indent=3))
    assert Tokenizer.load(again).hash == model.hash, "spaces mean nothing"
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (again / FILE).write_text(json.dumps(content))
    cut = Tokenizer.load(again / FILE)
    assert len(cut.encode(["the quick brown fox"])[0]) > 2, "nothing is cut off"
    assert cut.hash != model.hash

    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    assert Tokenizer.load(folder).end == Tokenizer.load(folder, end="<end>").end == 0
    assert Tokenizer.load(folder, end="").end is None
    with pytest.raises(WrongUse, match=r"no token '<eos>'.*did you mean '<end>'"):
        Tokenizer.load(folder, end="<eos>")
    (again / FILE).write_text("{}")
    with pytest.raises(WrongUse, match="is no tokenizer that can be read"):
        Tokenizer.load(again)
    with pytest.raises(WrongUse, match=r"is not there. Give a tokenizer.json"):
        Tokenizer.load(tmp_path / "none")


@pytest.mark.parametrize("name", ODD)
def test_what_is_no_object_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="no tokenizers (pip install 'phalanx[tokenizers]')")
    folder = train_tokenizer(TEXTS * 9, 280, tmp_path / "bpe")
    (folder / CONFIG).write_bytes(written(name))
    with pytest.raises(WrongUse, match=r"tokenizer_config\.json is no JSON object"):
        Tokenizer.load(folder)
    (folder / FILE).write_bytes(written(name))
    with pytest.raises(WrongUse, match=r"tokenizer\.json is no tokenizer that can be read"):
        Tokenizer.load(folder)


def test_a_tokenizer_without_tokens_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="no tokenizers (pip install 'phalanx[tokenizers]')")
    (tmp_path / FILE).write_text(json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}}))
    with pytest.raises(WrongUse, match="has no tokens"):
        Tokenizer.load(tmp_path)
