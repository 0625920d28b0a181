"""The key of a run: one for all hosts that see its folder, for its owner's eyes only, and never in words."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path

import pytest

from phalanx import CannotHere, WrongUse
from phalanx.launch.key import Key


def told(key: Key) -> bytes:
    return key.derive("client", "test", bytes(64))


def test_hosts_that_begin_together_find_one_key_that_only_its_owner_can_read(tmp_path: Path) -> None:
    found: list[bytes] = []
    hosts = [threading.Thread(target=lambda: found.append(told(Key.of_run(tmp_path)))) for _ in range(8)]
    for host in hosts:
        host.start()
    for host in hosts:
        host.join()
    assert len(set(found)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert told(Key.of_run(tmp_path)) == found[0]


def test_every_run_has_its_own(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    assert told(Key.of_run(tmp_path / "one")) != told(Key.of_run(tmp_path / "two"))
    assert told(Key()) != told(Key())


def test_the_environment_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_KEY", "correct horse battery staple")
    assert told(Key.of_run(tmp_path)) == told(Key(b"correct horse battery staple"))
    assert not (tmp_path / "key").exists()
    monkeypatch.setenv("PHALANX_KEY", "short")
    with pytest.raises(WrongUse, match=r"PHALANX_KEY has 5 characters, which can be guessed\."):
        Key.of_run(tmp_path)


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [("x" * 64, 0o644, "can be read by others"), ("", 0o600, "holds no key"), ("\udcff" * 64, 0o600, "it is no text")],
)
def test_a_file_that_is_no_secret_is_refused(tmp_path: Path, text: str, mode: int, words: str) -> None:
    (tmp_path / "key").write_bytes(text.encode(errors="surrogateescape"))
    (tmp_path / "key").chmod(mode)
    with pytest.raises((WrongUse, CannotHere), match=words):
        Key.of_run(tmp_path)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotHere, match=r"cannot be made or read here: No such file"):
        Key.of_run(tmp_path / "nowhere")


def test_it_never_shows_and_never_travels() -> None:
    key = Key(b"correct horse battery staple")
    assert repr(key) == str(key) == "Key(...)"
    with pytest.raises(TypeError):
        pickle.dumps(key)


def test_uses_purposes_and_sessions_are_apart() -> None:
    key = Key()
    ways = {
        key.derive(use, purpose, nonces)
        for use in ("client", "server", "client messages", "server messages")
        for purpose in ("rendezvous", "store at port 1")
        for nonces in (bytes(64), os.urandom(64))
    }
    assert len(ways) == 16
