"""The key of a run: one for all hosts that see its folder, for its owner's eyes only, and never in words."""

from __future__ import annotations

import hashlib
import os
import pickle
import secrets
import threading
import uuid
from pathlib import Path

import pytest

from phalanx import CannotHere, WrongUse
from phalanx.launch.key import FEWEST_BITS, ROUNDS, Key, bits_of


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


def test_the_environment_comes_first_and_is_slow_to_guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_KEY", "correct horse battery staple")
    stretched = hashlib.pbkdf2_hmac("sha256", b"correct horse battery staple", b"phalanx key", ROUNDS)
    assert ROUNDS >= 600_000
    assert told(Key.of_run(tmp_path)) == told(Key(stretched))
    assert not (tmp_path / "key").exists()
    monkeypatch.setenv("PHALANX_KEY", "short")
    with pytest.raises(WrongUse, match=r"PHALANX_KEY has 5 characters, which can be guessed\."):
        Key.of_run(tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        "a" * 64, "ab" * 32, "passwordpassword", "0123456789012345", "abcdefghijklmnop", "1111111111111112",
        "12345678901234567890", "qwqwqwqwqwqwqwqwqwqw", "aaaaaaaabbbbbbbbcccccccc", "mysecretpassword",
    ],
)  # fmt: skip
def test_words_that_can_be_guessed_are_refused(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_KEY", words)
    with pytest.raises(WrongUse, match=r"which can be guessed\. .*openssl rand -hex 32") as refusal:
        Key.of_run(tmp_path)
    assert "\n" not in str(refusal.value)
    assert words not in str(refusal.value)
    monkeypatch.delenv("PHALANX_KEY")
    (tmp_path / "key").touch(0o600)
    (tmp_path / "key").write_text(words)
    with pytest.raises(WrongUse, match=r"guessed|no key"):
        Key.of_run(tmp_path)


def test_random_words_of_any_kind_are_taken() -> None:
    for words in (secrets.token_hex(16), secrets.token_urlsafe(16), str(uuid.uuid4()), secrets.token_hex(32)):
        assert bits_of(words) >= FEWEST_BITS


def test_nothing_but_the_users_own_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "key"
    os.mkfifo(path, 0o600)
    with pytest.raises(WrongUse, match="key is no regular file"):
        Key.of_run(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(WrongUse, match="key is no regular file"):
        Key.of_run(tmp_path)
    path.rmdir()
    (tmp_path / "other").touch(0o600)
    (tmp_path / "other").write_text(secrets.token_hex(32))
    for target in ("other", "nowhere"):
        path.symlink_to(tmp_path / target)
        with pytest.raises(WrongUse, match="key is a link"):
            Key.of_run(tmp_path)
        path.unlink()
    for mode in (0o640, 0o604, 0o620, 0o602):
        path.touch(0o600)
        path.write_text(secrets.token_hex(32))
        path.chmod(mode)
        with pytest.raises(WrongUse, match=rf"can be read by others \(mode {mode:o}\)"):
            Key.of_run(tmp_path)
        path.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").touch(0o600)
    (tmp_path / "key").write_text(secrets.token_hex(32))
    os.chown(tmp_path / "key", 4242, 4242)
    with pytest.raises(WrongUse, match=r"belongs to another user \(number 4242\)"):
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
