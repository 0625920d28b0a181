"""Tokenizing: the same bytes by any number of workers, through kills, from any kind of file; or it is refused."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx import WrongUse
from phalanx.data import token_folder
from phalanx.data.encoding import Encoder
from phalanx.data.token_files import TokenFiles
from phalanx.data.token_folder import tokenize
from phalanx.data.token_manifest import TokenManifest, verify_tokens
from phalanx.data.tokenizer import Tokenizer, train_tokenizer
from tests.forking import fork

pytest.importorskip("tokenizers", reason="no tokenizers (pip install 'phalanx[tokenizers]')")
TEXTS = [f"document {i}: " + "the quick brown fox é " * (i % 5) for i in range(60)]
SMALL: dict[str, Any] = {"part_bytes": 300, "shard_tokens": 400}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tokenizer(TEXTS, 300, tmp_path_factory.mktemp("bpe"), ["<end>"])


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "a.jsonl", TEXTS)


def write_lines(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def documents(folder: Path, tokenizer: Path | str) -> Iterator[str]:
    """The texts that a folder has."""
    files, model = TokenFiles(folder, tokenizer), Tokenizer.load(tokenizer)
    tokens, ends = files.window(0, len(files))
    for start, stop in zip([0, *ends[:-1]], ends, strict=True):
        yield model.decode(tokens[start:stop])


def test_any_number_of_workers_writes_the_same_bytes(tmp_path: Path, lines: Path, tokenizer: Path) -> None:
    told: list[tuple[str, int, int]] = []
    for workers in (0, 1, 3):
        found = tokenize([lines], tmp_path / f"out{workers}", tokenizer, end="<end>", workers=workers, **SMALL,
                         progress=lambda *words: told.append(words))  # fmt: skip
    assert found.documents == len(TEXTS)
    assert len(found.shards) > 2
    assert contents(tmp_path / "out0") == contents(tmp_path / "out1") == contents(tmp_path / "out3")
    assert list(documents(tmp_path / "out3", tokenizer)) == [f"{text}<end>" for text in TEXTS]
    assert told[-1][1] <= told[-1][2] == lines.stat().st_size // len(told[: len(told) // 3]) * (len(told) // 3)
    assert not list(tmp_path.glob("*.unfinished"))
    assert {path.suffix for path in (tmp_path / "out0").iterdir()} == {".json", ".tokens", ".ends"}


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "parquet", "csv", "txt"])
def test_every_kind_of_file_gives_the_same_tokens(tmp_path: Path, tokenizer: Path, kind: str) -> None:
    path, lines = tmp_path / f"a.{kind}", write_lines(tmp_path / "lines.jsonl", TEXTS)
    if kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines.read_bytes()))
    elif kind == "csv":
        path.write_text("text\n" + "".join(f'"{text}"\n' for text in TEXTS))
    elif kind == "txt":
        path.write_text("\n".join(TEXTS))
    else:
        arrow = pytest.importorskip("pyarrow", reason="no pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        if kind == "parquet":
            parquet.write_table(arrow.table({"text": TEXTS}), path, row_group_size=9)
        else:
            with arrow.output_stream(str(path), compression="zstd") as file:
                file.write(lines.read_bytes())
    tokenize([path], tmp_path / "out", tokenizer, workers=0, **SMALL)
    want = ["\n".join(TEXTS)] if kind == "txt" else TEXTS
    assert list(documents(tmp_path / "out", tokenizer)) == want


def test_a_text_in_many_parts_is_one_document(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("".join(f"{name} line {i}\n" for i in range(200)))
    found = tokenize([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "out", "bytes", workers=0, **SMALL)
    assert (found.documents, found.vocabulary, found.dtype) == (2, 256, "uint16")
    assert list(documents(tmp_path / "out", "bytes")) == [(tmp_path / name).read_text() for name in ("a.txt", "b.txt")]
    assert [source["documents"] for source in found.sources] == [1, 1]


def _slowly(encode: Any, pause: float) -> Any:
    def slow(self: Encoder, number: int) -> Any:
        time.sleep(pause)
        return encode(self, number)

    return slow


def _tokenize_slowly(lines: Path, output: Path, workers: int) -> None:
    Encoder.encode = _slowly(Encoder.encode, 0.05)  # type: ignore[method-assign]
    tokenize([lines], output, "bytes", workers=workers, **SMALL)


@pytest.mark.parametrize("workers", [0, 2])
def test_who_is_killed_goes_on_to_the_same_bytes(tmp_path: Path, lines: Path, workers: int) -> None:
    tokenize([lines], tmp_path / "whole", "bytes", workers=0, **SMALL)
    unfinished = tmp_path / "out.unfinished"
    process = fork(_tokenize_slowly, lines, tmp_path / "out", workers)
    while len(list(unfinished.glob("shard-*.json"))) < 2:
        assert process.exitcode is None
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not (tmp_path / "out").exists()
    with pytest.raises(WrongUse, match=r"has no manifest.*run the same command again"):
        TokenFiles(tmp_path / "out")
    closed = list(unfinished.glob("shard-*.json"))
    times = {path: path.stat().st_mtime_ns for path in closed}
    for path in unfinished.glob("part-*.tokens"):
        path.write_bytes(b"torn")  # as a power cut may leave them
    with pytest.raises(WrongUse, match="from other inputs"):
        tokenize([write_lines(tmp_path / "b.jsonl", TEXTS[:3])], tmp_path / "out", "bytes", **SMALL)
    seen: list[int] = []
    tokenize([lines], tmp_path / "out", "bytes", workers=workers, **SMALL, progress=lambda w, d, t: seen.append(d))
    assert seen[0] > 2 * 300, "what was done is not done again"
    assert times
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_whoever_dies_before_the_rename_has_only_that_to_do(
    tmp_path: Path, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path, output: Path) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(token_folder, "_commit", fail)
        with pytest.raises(OSError, match="killed"):
            tokenize([lines], tmp_path / "out", "bytes", workers=0, **SMALL)
    for path in (tmp_path / "out.unfinished").glob("shard-*.json"):
        path.unlink()
    tokenize([lines], tmp_path / "out", "bytes", workers=0, **SMALL)
    tokenize([lines], tmp_path / "again", "bytes", workers=0, **SMALL)
    assert contents(tmp_path / "out") == contents(tmp_path / "again")


def test_what_is_there_is_kept_and_what_was_made_otherwise_is_refused(
    tmp_path: Path, lines: Path, tokenizer: Path
) -> None:
    first = tokenize([lines], tmp_path / "out", "bytes", workers=0)
    assert tokenize([lines], tmp_path / "out", "bytes", workers=0) == first
    for inputs, options, said in (
        ([lines], {"tokenizer": tokenizer}, "another tokenizer"),
        ([write_lines(tmp_path / "b.jsonl", TEXTS)], {"tokenizer": "bytes"}, "other inputs"),
        ([lines], {"tokenizer": "bytes", "field": "title"}, "another field"),
    ):
        with pytest.raises(WrongUse, match=rf"out is made .*{said}. Give another folder"):
            tokenize(inputs, tmp_path / "out", workers=0, **options)
    later = time.time_ns() + 10**9
    os.utime(lines, ns=(later, later))
    with pytest.raises(WrongUse, match=r"a\.jsonl was changed after"):
        tokenize([lines], tmp_path / "out", "bytes", workers=0)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").touch()
    with pytest.raises(WrongUse, match="holds other things"):
        tokenize([lines], tmp_path / "mine", "bytes", workers=0)


def test_a_tokenizer_is_the_same_wherever_it_lies(
    tmp_path: Path, lines: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tokenize([lines], tmp_path / "out", tokenizer, workers=0)
    monkeypatch.chdir(tokenizer)
    assert Tokenizer.load(".").name == Tokenizer.load("tokenizer.json").name == tokenizer.name
    assert tokenize([lines], tmp_path / "out", ".", workers=0) == first
    shutil.copytree(tokenizer, tmp_path / "moved")
    assert tokenize([lines], tmp_path / "out", tmp_path / "moved", workers=0) == first
    with pytest.raises(WrongUse, match="another tokenizer"):
        tokenize([lines], tmp_path / "out", ".", end="<end>", workers=0)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_row_stops_or_is_left_out(tmp_path: Path, workers: int) -> None:
    path = tmp_path / "a.jsonl"
    rows = [json.dumps({"text": text}) for text in TEXTS]
    rows[20], rows[30], rows[40], rows[50] = "{", '{"title": "x"}', '{"text": 3}', '{"text": "\\ud800"}'
    rows[10] = '{"text": ""}'
    path.write_text("\n".join(rows))
    with pytest.raises(WrongUse, match=r"a\.jsonl, row 21: it is not JSON"):
        tokenize([path], tmp_path / "out", "bytes", workers=workers, **SMALL)
    found = tokenize([path], tmp_path / "out", "bytes", workers=workers, bad_rows="skip", **SMALL)
    assert (found.bad, found.empty, found.documents) == (4, 1, 55)
    assert [row.split(":")[0] for row in found.bad_rows] == [f"a.jsonl, row {n}" for n in (21, 31, 41, 51)]
    assert "no field 'text'" in found.bad_rows[1]
    assert "surrogate" in found.bad_rows[3]


def test_nothing_to_encode_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(WrongUse, match="there is no text in"):
        tokenize([tmp_path / "a.jsonl"], tmp_path / "out", "bytes", workers=0)
    with pytest.raises(WrongUse, match="named twice"):
        tokenize([tmp_path, tmp_path / "a.jsonl"], tmp_path / "out", "bytes", workers=0)


def test_a_byte_that_was_changed_is_found(tmp_path: Path, lines: Path) -> None:
    tokenize([lines], tmp_path / "out", "bytes", workers=0, **SMALL)
    good = verify_tokens(tmp_path / "out")
    assert good is not None
    assert good.holds
    path = tmp_path / "out" / "shard-00001.ends"
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)
    found = verify_tokens(tmp_path / "out")
    assert found is not None
    assert not found.holds
    assert "shard-00001.ends is not what was written" in found.evidence[0]
    (tmp_path / "manifest.json").write_text('{"step": 3}')
    assert verify_tokens(tmp_path) is None, "a checkpoint's"
    manifest = TokenManifest.read(tmp_path / "out")
    assert manifest is not None
    assert np.dtype(manifest.dtype) == np.uint16
