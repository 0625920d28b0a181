"""Secrets: none is left in what is written, and what is no secret stays."""

from __future__ import annotations

import base64
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import pytest

from phalanx.errors import CannotHere, WrongUse
from phalanx.redact import (
    REDACTED,
    forget,
    is_redacted,
    learn,
    learn_task,
    learn_words,
    redact,
    redact_bytes,
    redact_field,
    redact_source,
    redact_words,
    refresh,
)


@pytest.mark.parametrize(
    "url",
    [
        "sftp://me:PASS@host/runs", "s3://AKIA:PA/SS@bucket/x", "ftp://me:PA@SS@host:21/x", "ftp://me:PA#SS?@host",
        "simplecache::s3://id:PASS@bucket/x", "sftp://:PASS@host/x", "https://PASS@host/x",
        "https://host/x?token=PASS", "https://host/x?a=1&X-Amz-Signature=PASS&b=2", "abfs://c@acc/x?sig=PASS",
        "http://host/?api_key=PASS#x", "http://host/?b=1;SecretAccessKey=PASS", "/x?token=PASS",
    ],
)  # fmt: skip
def test_a_secret_is_hidden_wherever_the_url_stands(url: str) -> None:
    for text in (url, f"{url!r} cannot be opened: {url}", f"OSError({url})\n  {url}"):
        hidden = redact(text)
        assert "PA" not in hidden
        assert "SS" not in hidden
        assert REDACTED in hidden
        assert redact(hidden) == hidden
    assert is_redacted("checkpoints", redact(url))


@pytest.mark.parametrize(
    "text",
    [
        "/data/runs", "s3://bucket/x", "sftp://me@host/x", "http://host:8080/a@b", "memory://", "a=1&b=2", "x@y:z",
        "abfs://container@account/x", "https://host/x?a=1&b=2", "loss 1.0 *** at step 3", "[::1]:29400",
        "tcp://127.0.0.1:29400 and you@example.org",
    ],
)  # fmt: skip
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text
    assert not is_redacted("checkpoints", text)


def test_fields_by_their_names() -> None:
    for name in ("password", "api_key", "HF_TOKEN", "token", "key", "db_password", "aws_secret_access_key", "secret"):
        assert redact_field(name, "PASS") == REDACTED, name
        assert is_redacted(name, redact_field(name, ["PASS"]))
    for name in ("pad_token", "tokens", "keyboard", "monkey", "secretary", "path"):
        assert redact_field(name, "PASS") == "PASS", name
    assert not is_redacted("separator", REDACTED)
    assert redact_field("token", "") == ""
    assert redact_field("key", 3) == 3
    assert redact_field("data", ("s3://a:PASS@b", 1)) == (f"s3://a:{REDACTED}@b", 1)


def test_fields_of_more_names_and_of_values_that_are_no_secret() -> None:
    for name in ("github_token", "my_token", "account_key", "db_pass", "auth", "bearer", "secrets", "pat", "webhook"):
        assert redact_field(name, "PASS") == REDACTED, name
        assert is_redacted(name, redact_field(name, "PASS"))
    for name, value in {"auth": "kerberos", "token": "<pad>", "password": "none", "secret": "$HOME_SECRET"}.items():
        assert redact_field(name, value) == value
    assert redact_field("password", 12345678) == REDACTED
    assert redact_field("use_password", True) is True
    assert redact_field("options", {"a": [{"key": "PASS"}], "b": 1}) == {"a": [{"key": REDACTED}], "b": 1}


def test_a_setting_with_a_secret_in_its_middle_must_be_given_again() -> None:
    for value in ("host=db password=hunter22 user=me", "Authorization: Basic dXNlcjpodW50ZXIyMg=="):
        written = redact_field("source", value)
        assert "hunter22" not in written
        assert is_redacted("source", written)
        assert is_redacted("source", json.loads(json.dumps([written])))
    learn({"password": "swordfish"})
    assert is_redacted("prompt", redact_field("prompt", "say swordfish to enter"))
    assert not is_redacted("prompt", redact_field("prompt", "say ***"))


@pytest.mark.parametrize(
    "secret", ["swordfish", "pa\"ss'w\\ord\u00e9", "with space & <more>", "100%/a+b?c#d@e:f", "tab\tx"]
)
def test_a_known_secret_is_found_however_it_is_written(secret: str) -> None:
    learn({"options": {"inner": [{"db_password": secret}]}})
    ways = [
        secret, repr(secret), json.dumps(secret), json.dumps(json.dumps(secret)), quote(secret), quote(secret, safe=""),
        json.dumps({"reason": f"said {secret}"}, ensure_ascii=False), base64.b64encode(secret.encode()).decode(),
        repr(KeyError(secret)), f"<p>{secret}</p>",
    ]  # fmt: skip
    for text in ways:
        assert secret not in redact(text), text
        assert REDACTED in redact(text), text


def test_lines_of_a_known_secret_are_secrets_too() -> None:
    learn({"private_key": "-----BEGIN X-----\nMIIEvQIBADANBgkq\nabcdefghijkl\n-----END X-----"})
    assert redact("line 2: MIIEvQIBADANBgkq") == f"line 2: {REDACTED}"


def test_a_short_secret_is_a_word_of_its_own_and_a_shorter_one_is_not_looked_for() -> None:
    learn({"password": "loss", "secret": "abc"})
    assert redact("the loss of abc is lossless, glosses") == f"the {REDACTED} of abc is lossless, glosses"
    assert redact(f"{REDACTED} loss2 loss.") == f"{REDACTED} loss2 {REDACTED}."


def test_what_is_learned_of_a_command_line() -> None:
    words = [
        "phalanx", "train", "a.py", "--set", "password=swordfish", "--set", 'options={"key": "hunter22", "width": 8}',
        "--checkpoints", "s3://me:trustno1x@bucket/x", "--token", "letmein1", "--set", "width=128", "--steps", "4",
    ]  # fmt: skip
    told = redact_words(words)
    assert told == [
        "phalanx", "train", "a.py", "--set", "password=***", "--set", 'options={"key": "***", "width": 8}',
        "--checkpoints", "s3://me:***@bucket/x", "--token", "***", "--set", "width=128", "--steps", "4",
    ]  # fmt: skip
    learn_words(words)
    for secret in ("swordfish", "hunter22", "trustno1x", "letmein1"):
        assert redact(f"it was {secret}!") == f"it was {REDACTED}!"
    assert redact("128 steps of a.py, 4 more") == "128 steps of a.py, 4 more"
    for secret in ("swordfish", "hunter22"):
        forget()
        assert redact(f"it was {secret}!") == f"it was {secret}!"


@dataclass
class Holder:
    token: str = "swordfish-1"
    source: str = "sftp://me:hunter22@host/x"
    width: int = 64
    name: str = "gpt"
    deep: dict[str, Any] = field(default_factory=lambda: {"a": {"client_secret": b"bytes-of-it"}})


def test_what_is_learned_of_a_task_and_what_it_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "fromenvironment")
    monkeypatch.setenv("SOME_KEY_FILE", "nosecretatall")
    task = Holder()
    learn_task(task)
    for secret in ("swordfish-1", "hunter22", "bytes-of-it", "fromenvironment"):
        assert secret not in redact(f"({secret})")
    assert redact("gpt 64 nosecretatall") == "gpt 64 nosecretatall"
    task.api_key = "read-from-a-file"  # type: ignore[attr-defined]
    assert "read-from-a-file" in redact("read-from-a-file")
    refresh()
    assert "read-from-a-file" not in redact("read-from-a-file")


def test_refusals_have_none() -> None:
    learn({"password": "swordfish"})
    for kind in (WrongUse, CannotHere):
        assert str(kind("steps='swordfish' is not a whole number.")) == "steps='***' is not a whole number."


def test_a_binary_record_keeps_its_places() -> None:
    learn({"password": "swordfish"})
    memory = bytearray(b"swordfish.a swordfish b")
    redact_bytes(memory, 1, len(memory))
    assert memory == b"swordfish.a ********* b"


def test_many_names_in_one_line_take_no_longer_than_their_letters() -> None:
    def seconds(count: int) -> float:
        found = []
        for _ in range(3):
            began = time.process_time()
            redact_source("token" * count)
            found.append(time.process_time() - began)
        return min(found)

    assert seconds(16_000) < 64 * seconds(1000) + 1e-3  # 256 times as long, if each name looked at all of the line
