"""Our own lines go past those of user code."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx import streams
from phalanx.redact import learn
from tests.forking import fork


def led(reading: int, writing: int, own: int) -> None:
    os.close(reading)
    os.dup2(own, 1)
    os.dup2(own, 2)
    streams.led_elsewhere(os.dup(writing), os.dup(writing))
    os.write(1, b"user's ")
    os.write(2, b"user's")
    print("ours", file=streams.stdout(), flush=True)
    print("ours too", file=streams.stderr(), flush=True)


def test_our_lines_go_where_they_did() -> None:
    (reading, writing), (hearing, own) = os.pipe(), os.pipe()
    process = fork(led, descriptors=(reading, writing, own))
    process.join()
    os.close(writing)
    os.close(own)
    with os.fdopen(reading) as theirs, os.fdopen(hearing) as ours:
        assert theirs.read() == "user's user's"
        assert ours.read() == "ours\nours too\n"


def test_without_that_they_are_the_ordinary_ones() -> None:
    import sys

    assert streams.stdout() is sys.stdout
    assert streams.stderr() is sys.stderr


def test_a_secret_that_its_reader_asked_for_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learn({"token": "a-long-token"})
    with (tmp_path / "out").open("wb") as out:
        monkeypatch.setattr("sys.stdout", streams.RedactedStream(out, encoding="utf-8"))
        print("first a-long-token", flush=True)
        streams.print_whole("then a-long-token")
        assert (tmp_path / "out").read_text() == "first ***\nthen a-long-token\n"
    with (tmp_path / "out").open("w") as plain:
        monkeypatch.setattr("sys.stdout", plain)
        streams.print_whole("a-long-token")
    assert (tmp_path / "out").read_text() == "a-long-token\n"
