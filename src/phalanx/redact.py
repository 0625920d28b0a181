"""Redaction: passwords and keys taken out of all that is written or printed.

A URL may carry a password (``sftp://me:password@host/runs``) or a key (``https://host/x?token=...``), a task a field
that is one. They stay where they were given. In their place stands `REDACTED`, and what has it must be given again.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

REDACTED = "***"
SHORTEST = 4
"""Letters of a secret that is looked for by itself: any shorter one is found everywhere."""
WORD = r"(?:key|token|secret|passw(?:or)?d|passphrase|pwd|sig|signature|credentials?|sas|auth)"
_PASSWORD = re.compile(r"(\w://[^\s/?#@:]*:)(?:[^\s/?#]*|(?!\d{1,5}/)[^\s@]*)@")
"""``://user:password@``, up to the last ``@`` before the path; a port is no password."""
_TOKEN = re.compile(r"(\bhttps?://)[^\s/?#@:]+@")
_PARAMETER = re.compile(rf"([?&;#][\w.%-]{{0,64}}{WORD}[\w.%-]{{0,64}}=)[^&;#\s'\"]+", re.IGNORECASE)
_VARIABLE = re.compile(r"(\b[A-Z][A-Z0-9_]{0,64}(?:KEY|TOKEN|SECRET|PASSWORD)=|\b[Bb]earer )[^\s'\"]+")
"""Of an environment, and of a request's head."""
_FIELD = re.compile(
    r"(?:.*_)?(?:password|passwd|passphrase|pwd|secret|credentials?|api_?key|access_?key|secret_?key|private_?key"
    r"|(?:api|access|auth|hf|hub|bearer|session|secret|wandb)_?token)|key|token",
    re.IGNORECASE,
)
_LITERAL = re.compile(
    r"(\b\w*(?:api_?key|access_?key|secret|token|passw(?:or)?d|passphrase|private_?key|credentials?)\w*['\"]?\]?\s*"
    r"(?::\s*\w+\s*)?[=:]\s*[a-zA-Z]{0,2}['\"])[^'\"\s]{6,}(['\"])",
    re.IGNORECASE,
)
"""``api_key = "..."``, and the same in a dict or a call."""
_FORMS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16}|xox[abp]-[\w-]{10,})"
)
"""What some services' keys look like."""
_LEFT_OUT = re.compile(r"(?:://\S*|[?&;#][^\s=]*=)" + re.escape(REDACTED))


def redact(text: str) -> str:
    """The text with the secrets of all URLs in it hidden."""
    if "://" in text:
        text = _TOKEN.sub(rf"\1{REDACTED}@", _PASSWORD.sub(rf"\1{REDACTED}@", text))
    text = _VARIABLE.sub(rf"\1{REDACTED}", text)
    return _PARAMETER.sub(rf"\1{REDACTED}", text) if "=" in text else text


def redact_source(text: str, secrets: Collection[str] = ()) -> str:
    """Source code likewise, without what it gives to names that say that it is a secret, nor any that is known."""
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    return _FORMS.sub(REDACTED, _LITERAL.sub(rf"\1{REDACTED}\2", redact(text)))


def secrets(fields: Mapping[str, Any]) -> list[str]:
    """Those among settings that are long enough to be one."""
    texts = {value for name, value in fields.items() if isinstance(value, str) and _FIELD.fullmatch(name)}
    return sorted((text for text in texts if len(text) >= SHORTEST), key=len, reverse=True)


def redact_field(name: str, value: Any) -> Any:
    """A setting as it may be written: hidden if its name says that it is a secret, or without the secrets in it."""
    if isinstance(value, str):
        return REDACTED if value and _FIELD.fullmatch(name) else redact(value)
    if isinstance(value, (list, tuple)):
        return type(value)(redact_field(name, item) for item in value)
    if isinstance(value, dict):
        return {inner: redact_field(_name(name, inner), item) for inner, item in value.items()}
    return value


def _name(outer: str, inner: Any) -> str:
    """What a value in a table is: that of a table which is a secret is one."""
    return outer if _FIELD.fullmatch(outer) else str(inner)


def is_redacted(name: str, value: Any) -> bool:
    """Whether a secret was left out of a setting that was read back."""
    if isinstance(value, list):
        return any(is_redacted(name, item) for item in value)
    if isinstance(value, dict):
        return any(is_redacted(_name(name, inner), item) for inner, item in value.items())
    if not isinstance(value, str):
        return False
    return bool(_LEFT_OUT.search(value)) or (value == REDACTED and _FIELD.fullmatch(name) is not None)
