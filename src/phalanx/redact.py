"""Redaction: passwords and keys taken out of all that is written or printed.

A URL may carry a password (``sftp://me:password@host/runs``) or a key (``https://host/x?token=...``), a task a field
that is one. They stay where they were given. In their place stands `REDACTED`, and what has it must be given again.

This process, and those that are forked from it, also know secrets by themselves (`learn`): values of fields, of the
command line and of the environment. Those are taken out wherever they turn up, in an exception's words too.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import json
import os
import re
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import quote, quote_plus, unquote

from phalanx.secret_names import Secrecy, secrecy
from phalanx.secret_texts import is_mixed, secrets_in

REDACTED = "***"
LEFT_OUT = "<***>"
"""In place of a secret in the middle of a setting that is no URL."""
SHORTEST = 4
"""Letters of a secret that is looked for by itself: any shorter one is found everywhere."""
APART = 8
"""A shorter one is looked for as a word of its own."""
MOST_KNOWN = 4096
MOST_LETTERS, MOST_ITEMS = 4096, 256
"""Of a setting that is looked into."""
LARGE = (str, bytes, Mapping, list, tuple, set, frozenset)
_LEFT_OUT = re.compile(rf"(?:://\S*|[?&;#][^\s=]*=){re.escape(REDACTED)}|{re.escape(LEFT_OUT)}")
_NO_VALUES = frozenset({"", "none", "null", "true", "false", REDACTED})
_WAYS = frozenset({"auto", "basic", "bearer", "digest", "kerberos", "ntlm", "oauth", "oauth2", "anonymous"})
"""Of proving who one is, which a field named ``auth`` may say."""
_OF_TEXT = re.compile(r"<[^<>]*>|\[[A-Z_]+\]|[▁Ġ].*|\S{1,2}")
"""Tokens of a tokenizer's."""

_known: dict[str, re.Pattern[str] | None] = {}
"""Secrets, the longest first; with how a short one is looked for."""
_held: list[weakref.ref[Any]] = []
"""Tasks whose fields are looked at again by `refresh`."""
_lock = threading.Lock()


def redact(text: str) -> str:
    """The text without the secrets that this process knows, and those that it shows by names and forms."""
    return _without(redact_known(text), REDACTED)


def redact_source(text: str) -> str:
    """Python code likewise: what it gives to names of secrets as literals is taken out, and its calls stay."""
    return _without(redact_known(text), REDACTED, source=True)


def redact_known(text: str) -> str:
    """The text without the secrets that this process knows."""
    for secret, alone in _known.items():
        if secret in text:
            text = text.replace(secret, REDACTED) if alone is None else alone.sub(REDACTED, text)
    return text


def redact_bytes(memory: bytearray, start: int, stop: int) -> None:
    """Known secrets in a part of a binary record, each letter a star: all else stays where it is."""
    for secret in _known:
        letters = secret.encode(errors="surrogateescape")
        at = memory.find(letters, start, stop)
        while at >= 0:
            memory[at : at + len(letters)] = b"*" * len(letters)
            at = memory.find(letters, at + len(letters), stop)


def redact_field(name: str, value: Any) -> Any:
    """A setting as it may be written: hidden if its name says that it is a secret, or without the secrets in it."""
    if isinstance(value, str):
        if _is_secret(name, value):
            return REDACTED
        hidden = redact(value)
        return hidden if _LEFT_OUT.search(hidden) else _without(_known_out(value), LEFT_OUT)
    if isinstance(value, int) and not isinstance(value, bool):
        return REDACTED if _is_secret(name, value) else value
    if isinstance(value, (list, tuple)):
        return type(value)(redact_field(name, item) for item in value)
    if isinstance(value, dict):
        return {inner: redact_field(_name(name, inner), item) for inner, item in value.items()}
    return value


def redact_words(words: Sequence[str]) -> list[str]:
    """A command line without secrets: those of options, of ``--set name=value``, and of all that texts show."""
    told = []
    for before, word in zip(("", *words), words, strict=False):
        name, equals, value = word.partition("=")
        if before.startswith("-") and _is_secret(before, word) and not word.startswith("-"):
            told.append(REDACTED)
        elif equals and re.fullmatch(r"[\w.-]+", name):
            inner = _read(value)
            hidden = redact_field(name.lstrip("-"), value if inner is None else inner)
            same = hidden == (value if inner is None else inner)
            told.append(redact(word) if same else f"{name}={hidden if isinstance(hidden, str) else json.dumps(hidden)}")
        else:
            told.append(redact(word))
    return told


def is_redacted(name: str, value: Any) -> bool:
    """Whether a secret was left out of a setting that was read back."""
    if isinstance(value, list):
        return any(is_redacted(name, item) for item in value)
    if isinstance(value, dict):
        return any(is_redacted(_name(name, inner), item) for inner, item in value.items())
    if not isinstance(value, str):
        return False
    return bool(_LEFT_OUT.search(value)) or (value == REDACTED and secrecy(name) > Secrecy.NONE)


# What this process knows


def learn(fields: Mapping[str, Any]) -> None:
    """Know the secrets among settings: values of fields with such names, however deep, and passwords in texts."""
    found: set[str] = set()
    for name, value in fields.items():
        _collect(found, str(name), value)
    _know(found)


def learn_words(words: Sequence[str]) -> None:
    """Know those of a command line."""
    found: set[str] = set()
    for before, word in zip(("", *words), words, strict=False):
        name, equals, value = word.partition("=")
        if before.startswith("-") and not word.startswith("-"):
            _collect(found, before.lstrip("-"), word)
        if equals and re.fullmatch(r"[\w.-]+", name):
            inner = _read(value)
            _collect(found, name.lstrip("-"), value if inner is None else inner)
        _collect(found, "", word)
    _know(found)


def learn_task(task: object) -> None:
    """Know those of a task's fields and of the environment; of what it is given later, too, after a `refresh`."""
    learn({name: value for name, value in os.environ.items() if len(value) >= APART and not os.path.exists(value)})
    if all(held() is not task for held in _held):
        with suppress(TypeError):  # a class with slots
            _held.append(weakref.ref(task))
    with suppress(RuntimeError):
        learn(dict(getattr(task, "__dict__", {})))


def refresh() -> None:
    """Look at tasks' fields again: their code may have read a secret since."""
    for held in _held:
        task = held()
        if task is not None:
            with suppress(RuntimeError):  # a thread has changed one of its tables meanwhile
                learn(dict(vars(task)))
    _held[:] = [held for held in _held if held() is not None]


def forget() -> None:
    """Know nothing any more."""
    with _lock:
        _known.clear()
        _held.clear()


def _collect(found: set[str], name: str, value: Any, depth: int = 6) -> None:
    """Put the secrets of a setting into a set; of what is large, and has no secret's name, nothing: it is data."""
    most = MOST_LETTERS if isinstance(value, (str, bytes)) else MOST_ITEMS
    if secrecy(name) is Secrecy.NONE and hasattr(value, "__len__") and isinstance(value, LARGE) and len(value) > most:
        return
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if isinstance(value, str):
        known = secrecy(name)
        if value.startswith(("/", "~")) and os.path.exists(os.path.expanduser(value[:4096])):
            return  # where one is kept
        long = len(value) >= APART and not name.lower().endswith("key")  # which may be a column's name
        if _is_secret(name, value) and (known is Secrecy.CERTAIN or is_mixed(value) or long):
            found.add(value)
        found.update(value[start:end] for start, end in secrets_in(value))
    elif isinstance(value, int) and _is_secret(name, value):
        found.add(str(value))
    elif depth and isinstance(value, Mapping):
        for inner, item in value.items():
            _collect(found, _name(name, inner), item, depth - 1)
    elif depth and isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            _collect(found, name, item, depth - 1)
    elif depth and dataclasses.is_dataclass(value) and not isinstance(value, type):
        for inner, item in vars(value).items() if hasattr(value, "__dict__") else ():
            _collect(found, _name(name, inner), item, depth - 1)


def _know(secrets: set[str]) -> None:
    """Look for these from now on, as they are and as they are written elsewhere."""
    forms = {form for secret in secrets for form in _forms(secret) if len(form) >= SHORTEST} - _known.keys()
    if not forms:
        return
    with _lock:
        every = sorted({*_known, *forms}, key=len, reverse=True)[:MOST_KNOWN]
        known = {each: _known.get(each) or _alone(each) for each in every}
        _known.clear()
        _known.update(known)


def _forms(secret: str) -> set[str]:
    """A secret as texts have it: escaped by JSON, Python, URLs and HTML, in base64, and line by line."""
    secret = secret.strip()
    if len(secret) < SHORTEST or secret.lower() in _NO_VALUES:
        return set()
    found = {secret, unquote(secret), html.escape(secret)}
    with suppress(UnicodeEncodeError):
        found |= {quote(secret), quote(secret, safe=""), quote_plus(secret)}
        found.add(base64.b64encode(secret.encode()).decode().rstrip("="))
    once = json.dumps(secret)[1:-1]
    found |= {once, json.dumps(once)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret)[1:-1]}
    found |= {line.strip() for line in secret.splitlines() if len(line.strip()) >= APART and "-----" not in line}
    return found


def _alone(secret: str) -> re.Pattern[str] | None:
    """How a short one is looked for: letters of a word that only begins like it are none."""
    if len(secret) >= APART or not secret.isalnum():
        return None
    return re.compile(rf"(?<![A-Za-z0-9]){re.escape(secret)}(?![A-Za-z0-9])")


def _is_secret(name: str, value: str | int) -> bool:
    """Whether a setting's name says that it is one, and its value may be."""
    known = secrecy(name)
    if isinstance(value, int):
        return known is Secrecy.CERTAIN and not isinstance(value, bool) and value >= 10 ** (SHORTEST - 1)
    if known is Secrecy.NONE or value.lower() in _NO_VALUES or re.fullmatch(r"\$\{?[A-Z_][A-Z0-9_]*\}?", value):
        return False
    return known is Secrecy.CERTAIN or not (value.lower() in _WAYS or _OF_TEXT.fullmatch(value))


def _name(outer: str, inner: Any) -> str:
    """What a value in a table is: that of a table which is a secret is one."""
    return outer if secrecy(outer) else str(inner)


def _read(value: str) -> Any:
    """A table or a list that a word says in JSON."""
    if value[:1] in ("{", "["):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return None


def _known_out(value: str) -> str:
    hidden = redact_known(value)
    return value if hidden == value else hidden.replace(REDACTED, LEFT_OUT)


def _without(text: str, mark: str, source: bool = False) -> str:
    """The text with a mark in place of each secret that it shows."""
    spans = secrets_in(text, source)
    if not spans:
        return text
    told, last = [], 0
    for start, end in spans:
        told += [text[last:start], mark]
        last = end
    return "".join([*told, text[last:]])
