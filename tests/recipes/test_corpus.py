"""Text to train on: files of text are tokenized once, token files are taken as they are, and rates fall as asked."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

import phalanx
from phalanx.data import Mixture, PackedFiles, tokenize
from phalanx.data.tokenizer import train_tokenizer
from phalanx.recipes.corpus import Corpus, standard_library


def text(path: Path, words: str, times: int = 300) -> Path:
    path.write_text("".join(f"{words} {i % 7}\n" for i in range(times)))
    return path


def test_texts_are_tokenized_once_and_token_files_taken_as_they_are(tmp_path: Path) -> None:
    one, two = text(tmp_path / "one.txt", "some words"), text(tmp_path / "two.txt", "and others")
    tokenize([two], tmp_path / "two", "bytes", workers=0)
    cache = tmp_path / "cache"
    task = Corpus(sources=(str(one), str(tmp_path / "two")), weights=(3, 1), cache=str(cache), length=16)
    data, held = task.data(), task.held_out()
    assert isinstance(data, Mixture)
    assert data.names == held.names == ["one", "two"]
    assert data.curriculum == ((0, (0.75, 0.25)),)
    assert task.known_tokenizer.vocabulary == 256, "that of the token files"
    assert bytes(data[0]["tokens"].tolist()) == one.read_bytes()[:16]
    (made,) = cache.glob("tokens-*")
    before = made.stat().st_mtime_ns
    assert len(Corpus(sources=(str(one),), tokenizer="bytes", cache=str(cache), length=16).data()) == data.sizes[0]
    assert made.stat().st_mtime_ns == before
    train = data.parts[0]
    assert isinstance(train, PackedFiles)
    assert train.stop == held.parts[0].start, "none of it is in both"


@pytest.mark.parametrize("given", [True, False])
def test_documents_of_all_sources_end_as_those_of_token_files(tmp_path: Path, given: bool) -> None:
    pytest.importorskip("tokenizers", reason="no tokenizers (pip install 'phalanx[tokenizers]')")
    one, two = text(tmp_path / "one.txt", "some words"), text(tmp_path / "two.txt", "and others")
    bpe = train_tokenizer([one.read_text()], 270, tmp_path / "bpe", ["<eos>"])
    tokenize([two], tmp_path / "two", bpe, end="<eos>", workers=0)
    options = {"cache": str(tmp_path / "cache"), "length": 16, "tokenizer": str(bpe) if given else ""}
    task = Corpus(sources=(str(tmp_path / "two"), str(one)), **options)  # type: ignore[arg-type]
    assert task.known_tokenizer.end == task.known_tokenizer.special("<eos>")
    for files in task._files.values():
        assert files.window(0, len(files))[0][-1] == task.known_tokenizer.end
    alone = Corpus(sources=(str(one),), **options | {"tokenizer": str(bpe)})  # type: ignore[arg-type]
    files = alone._files["one"]
    assert files.window(0, len(files))[0][-1] != task.known_tokenizer.end, "as the tokenizer itself says"


def test_a_small_tokenizer_is_trained_where_none_is_given(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="no tokenizers (pip install 'phalanx[tokenizers]')")
    one = text(tmp_path / "one.txt", "some words that come again")
    options = {"sources": (str(one),), "cache": str(tmp_path / "cache"), "vocabulary": 270, "length": 8}
    task = Corpus(**options)  # type: ignore[arg-type]
    assert 256 < task.known_tokenizer.vocabulary <= 270
    assert len(task.data()) * 8 < len(one.read_bytes())
    with pytest.raises(phalanx.WrongUse, match="Set it to 256 or more"):
        Corpus(**options | {"vocabulary": 10}).data()  # type: ignore[arg-type]


def test_a_plateau_falls_at_its_end() -> None:
    rate = Corpus(steps=100, warmup_steps=10, rate="wsd:decay=0.2").schedule()
    assert callable(rate)
    assert [round(rate(step), 3) for step in (0, 9, 10, 80, 90, 100)] == [0.1, 1, 1, 1, 0.55, 0.1]


@pytest.mark.parametrize(
    ("options", "said"),
    [({"weights": (1.0,)}, "no effect with one source"), ({"rate": "wsd:decay=0"}, "is not a share")],
)
def test_settings_without_effect_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(phalanx.WrongUse, match=said):
        Corpus(**options).check()  # type: ignore[arg-type]


def test_too_little_of_the_library_is_refused() -> None:
    with pytest.raises(phalanx.WrongUse, match="Set it higher"):
        Corpus(megabytes=1e-6, tokenizer="bytes").data()


def test_a_library_with_links_to_its_own_files_has_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As some Linux distributions lay Python out."""
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("x = 1\n" * 20)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "a.py").symlink_to(tmp_path / "a.py")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert standard_library() == [tmp_path / "a.py", tmp_path / "b.py"]
