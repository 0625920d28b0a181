"""Rows are encoded once on a host, whoever asks, and again when anything has changed that the tokens follow from."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx import WrongUse
from phalanx.data import encoded_rows
from phalanx.data.chat import Chat
from phalanx.data.chat_tokenizer import trained
from phalanx.data.encoded_rows import encoded_once
from phalanx.data.row_file import RowFile
from phalanx.data.supervised import Supervised, encoded

pytest.importorskip("transformers", reason="transformers is not installed (the dev extra has it)")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoded_rows, "SMALL_BYTES", 0)


def asked(tmp_path: Path, count: int = 40) -> Path:
    rows = [{"question": f"What is {n} and {n}?", "answer": f"It is {2 * n}."} for n in range(count)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def once(path: Path, folder: Path, **changed: Any) -> Any:
    chat = Chat(trained(["What is 1 and 1? It is 2."], 300), changed.pop("loss_on", "answers"))
    settings = {"length": 32, "vocabulary": 300, "bad_rows": "stop"} | changed
    return encoded_once(RowFile(path), chat, **settings, folder=folder)


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def test_what_is_kept_is_what_was_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = asked(tmp_path), tmp_path / "kept"
    chat = Chat(trained(["What is 1 and 1? It is 2."], 300))
    plain = encoded(RowFile(path), chat, 32, 300)
    first = once(path, folder)
    monkeypatch.setattr(encoded_rows, "encoded", None)  # it is not encoded again
    second = once(path, folder)
    for found in (first, second):
        assert (found.rows, found.left_out, found.cut) == (plain.rows, plain.left_out, plain.cut)
        for (ids, counted), (own, own_counted) in zip(found.documents, plain.documents, strict=True):
            assert np.array_equal(ids, own)
            assert np.array_equal(counted, own_counted)
            assert ids.dtype == own.dtype
        samples = Supervised(found.documents, 32), Supervised(plain.documents, 32)
        assert all(bool((samples[0][0][name] == samples[1][0][name]).all()) for name in samples[0][0])
    assert isinstance(second.documents[0][0].base, np.memmap), "and ranks share the memory"


def test_anything_that_tokens_follow_from_makes_another_entry(tmp_path: Path) -> None:
    path, folder = asked(tmp_path), tmp_path / "kept"
    once(path, folder)
    for number, changed in enumerate(({"length": 16}, {"loss_on": "all"}, {"vocabulary": 301}), start=2):
        once(path, folder, **changed)
        assert len(entries(folder)) == number
    before = path.stat()
    path.write_text(path.read_text().replace("What is 3", "What is 4"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as long as before, and as old
    once(path, folder)
    assert len(entries(folder)) == 5


def test_a_bad_row_is_named_and_nothing_is_kept(tmp_path: Path) -> None:
    path, folder = asked(tmp_path), tmp_path / "kept"
    path.write_text(path.read_text() + "no json\n")
    with pytest.raises(WrongUse, match=r"rows\.jsonl, row 41: not JSON"):
        once(path, folder)
    assert entries(folder) == []
    found = once(path, folder, bad_rows="skip")
    assert found.left_out == once(path, folder, bad_rows="skip").left_out
    assert "row 41: not JSON" in found.left_out


def test_of_several_that_ask_one_encodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder, noted = asked(tmp_path), tmp_path / "kept", tmp_path / "noted"

    def slowly(*given: Any) -> Any:
        with noted.open("a") as file:
            file.write("x")
        time.sleep(0.3)
        return encoded(*given)

    monkeypatch.setattr(encoded_rows, "encoded", slowly)
    context = multiprocessing.get_context("fork")
    others = [context.Process(target=once, args=(path, folder)) for _ in range(3)]
    for other in others:
        other.start()
    for other in others:
        other.join()
        assert other.exitcode == 0
    assert noted.read_text() == "x"


def test_what_is_old_goes_and_what_cannot_be_kept_is_encoded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, folder = asked(tmp_path), tmp_path / "kept"
    once(path, folder)
    (old,) = entries(folder)
    os.utime(folder / old, (0, 0))
    once(path, folder, length=16)
    assert old not in entries(folder)
    (tmp_path / "file").touch()
    assert len(once(path, tmp_path / "file" / "below").documents) == 40
    assert "encoded rows are not kept in" in capfd.readouterr().err
