"""Tokenizers by name: ``bytes``, or a ``tokenizer.json`` as Hugging Face's tokenizers write it.

What tokens mean follows from the tokenizer's hash, which token files carry along.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.errors import CannotHere, WrongUse, closest
from phalanx.files import EVERYBODYS, json_object, write_whole
from phalanx.processes import aside

BYTES = "bytes"
FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"


class Tokenizer:
    """Text to ids. ``end``: the id that closes each document, if there is one."""

    def __init__(self, name: str, hash: str, vocabulary: int, end: int | None, end_token: str, model: Any) -> None:
        self.name, self.hash, self.vocabulary, self.end, self.end_token = name, hash, vocabulary, end, end_token
        self._model = model

    @classmethod
    def load(cls, name: str | Path, end: str | None = None) -> Tokenizer:
        """By name. ``end``: the token that closes each document; by default what ``tokenizer_config.json`` beside it
        calls ``eos_token``, and none where there is no such file."""
        if str(name) == BYTES:
            if end:
                raise WrongUse(f"a tokenizer of bytes has no token {end!r}. Leave --end out.")
            return cls(BYTES, hashlib.sha256(BYTES.encode()).hexdigest(), 256, None, "", None)
        path = file_of(name)
        model, content = _loaded(path)
        known = model.get_vocab(with_added_tokens=True)
        if not known:
            raise WrongUse(f"{path} has no tokens. Give a {FILE} as tokenizers write it.")
        token = _eos(path) if end is None else end
        if token and token not in known:
            raise WrongUse(f"{path} has no token {token!r} to end documents with; {closest(token, _special(model))}")
        hash = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        name = path.parent.resolve().name
        return cls(name, hash, max(known.values()) + 1, known[token] if token else None, token, model)

    @property
    def dtype(self) -> np.dtype:
        """The narrowest that holds every id, little-endian on any machine."""
        return np.dtype("<u2" if self.vocabulary <= 1 << 16 else "<u4")

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, without any special token."""
        if self._model is None:
            return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]
        return [np.array(found.ids, dtype=self.dtype) for found in self._encode(texts)]

    def decode(self, ids: Iterable[int]) -> str:
        numbers = [int(number) for number in ids]
        if self._model is None:
            return bytes(numbers).decode(errors="replace")
        return str(self._model.decode(numbers, skip_special_tokens=False))

    def special(self, token: str) -> int | None:
        """The id of a token by its text, such as ``[MASK]``."""
        return None if self._model is None else self._model.token_to_id(token)

    def _encode(self, texts: Sequence[str]) -> list[Any]:
        fast = getattr(self._model, "encode_batch_fast", self._model.encode_batch)  # without places in the text
        return fast(list(texts), add_special_tokens=False)


def file_of(name: str | Path) -> Path:
    """The ``tokenizer.json`` that a file's or folder's name means."""
    path = Path(name)
    found = path / FILE if path.is_dir() else path
    if not found.is_file():
        raise WrongUse(f"the tokenizer {found} is not there. Give a {FILE}, a folder that has one, or bytes.")
    return found


def on_one_thread() -> None:
    """Have this process encode on one thread: several processes share the cores."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def train_tokenizer(texts: Sequence[str], vocabulary: int, folder: Path, special: Sequence[str] = ()) -> Path:
    """Train a byte-level BPE on texts and write it to a folder; returns that. The same texts give the same bytes."""
    # its threads would not survive a fork
    content = aside(lambda: str(byte_pairs(texts, vocabulary, special).to_str()))
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / FILE, content, EVERYBODYS)
    return folder


def byte_pairs(texts: Iterable[str], vocabulary: int, special: Sequence[str]) -> Any:
    """A byte-level BPE of at most so many ids, special tokens among them, as the library has it."""
    tokenizers = _library()
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=list(special), show_progress=False,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    model.train_from_iterator(texts, trainer)
    return model


def _loaded(path: Path) -> tuple[Any, dict[str, Any]]:
    """A tokenizer, and what its file says."""
    tokenizers = _library()
    try:
        content = json_object(path)
        model = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise WrongUse(
            f"{path} is no tokenizer that can be read: {error}. Give a {FILE} as tokenizers write it."
        ) from None
    model.no_truncation()  # a file may say that texts are cut or filled up
    model.no_padding()
    return model, content


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise CannotHere("this tokenizer needs tokenizers. Install it: pip install 'phalanx[tokenizers]'") from None
    return tokenizers


def _eos(path: Path) -> str:
    """What the configuration beside a tokenizer calls the end of a text; empty if there is none."""
    config = path.with_name(CONFIG)
    if not config.is_file():
        return ""
    try:
        token = json_object(config).get("eos_token")
    except ValueError as error:
        raise WrongUse(f"{config} is no JSON object ({error}). Mend it, or say --end TOKEN.") from None
    return str(token.get("content", "") if isinstance(token, dict) else token or "")


def _special(model: Any) -> list[str]:
    return [token.content for token in model.get_added_tokens_decoder().values()]
