"""Secrets: none is left in what is written, and what is no secret stays."""

from __future__ import annotations

import pytest

from phalanx.redact import REDACTED, is_redacted, redact, redact_field


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
