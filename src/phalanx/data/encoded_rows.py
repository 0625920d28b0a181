"""Encoded conversations kept in a folder: of several ranks on a host, or several runs, one encodes and all read.

An entry is named by a hash of everything that its tokens follow from: the rows' own bytes, the tokenizer, its template,
and how they are cut off. It appears by one rename, is memory-mapped, so that ranks of a host share its memory, and goes
when nobody has used it for a while.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from phalanx import streams
from phalanx.data.chat import Chat
from phalanx.data.row_file import RowFile
from phalanx.data.supervised import Encoded, encoded
from phalanx.events import say
from phalanx.task import BadRows

SMALL_BYTES = 1 << 20
"""Fewer bytes of rows are encoded in a moment, by each rank."""
UNUSED_SECONDS = 30 * 24 * 3600
FORMAT = 2
FACTS = "facts.json"


def encoded_once(
    rows: RowFile, chat: Chat, length: int, vocabulary: int, bad_rows: BadRows, folder: Path
) -> Encoded:  # fmt: skip
    """What `encoded` gives, from a folder if it has it. Of several that ask, one encodes and the others wait for it."""
    files = [path for path in sorted(rows.path.rglob("*")) if path.is_file()] if rows.path.is_dir() else [rows.path]
    if sum(path.stat().st_size for path in files) < SMALL_BYTES:
        return encoded(rows, chat, length, vocabulary, bad_rows)
    place = folder / _key(files, chat, [str(rows.path), length, vocabulary, bad_rows])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder / f"{place.name}.lock"):
            if not (place / FACTS).exists():
                _write(place, encoded(rows, chat, length, vocabulary, bad_rows))
                _let_go(folder, but=place.name)
            os.utime(place)
            return _read(place)
    except OSError as error:
        say(f"   note  encoded rows are not kept in {folder} ({error.strerror or error})", streams.stderr())
        return encoded(rows, chat, length, vocabulary, bad_rows)


def _key(files: list[Path], chat: Chat, settings: list[Any]) -> str:
    """A hash of all that the tokens follow from."""
    tokenizer, template = chat.tokenizer, str(chat.tokenizer.chat_template)
    marks = [tokenizer.eos_token, tokenizer.special_tokens_map, chat.loss_on, chat.by_template]
    today = time.strftime("%Y-%m-%d") if "strftime_now" in template else ""  # such a template writes the date
    found = hashlib.blake2b(digest_size=16)
    found.update(json.dumps([FORMAT, settings, template, marks, today, _versions()], default=str).encode())
    found.update(tokenizer.backend_tokenizer.to_str().encode())
    for path in files:
        with path.open("rb") as file:
            found.update(f"{path.name} {path.stat().st_size}".encode())
            while block := file.read(1 << 20):
                found.update(block)
    return found.hexdigest()


def _versions() -> list[str]:
    import tokenizers
    import transformers

    return [transformers.__version__, tokenizers.__version__]


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Nobody else is in here, on this host at least; whoever ends, by a kill too, leaves."""
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.utime(lock)
        yield


def _write(place: Path, found: Encoded) -> None:
    unfinished = Path(tempfile.mkdtemp(prefix=f"{place.name}.", suffix=".unfinished", dir=place.parent))
    try:
        np.save(unfinished / "tokens.npy", np.concatenate([ids for ids, _ in found.documents]))
        np.save(unfinished / "counted.npy", np.concatenate([counted for _, counted in found.documents]))
        np.save(unfinished / "ends.npy", np.cumsum([len(ids) for ids, _ in found.documents]))
        facts = {"rows": found.rows, "left_out": found.left_out, "cut": found.cut, "kept": found.kept}
        (unfinished / FACTS).write_text(json.dumps(facts))
        for path in unfinished.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if (place / FACTS).exists():  # of another host, whose lock this one does not see: its ranks have it mapped
            shutil.rmtree(unfinished)
            return
        shutil.rmtree(place, ignore_errors=True)  # what has no facts
        unfinished.rename(place)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _read(place: Path) -> Encoded:
    tokens, counted = (np.load(place / name, mmap_mode="r") for name in ("tokens.npy", "counted.npy"))
    ends = np.load(place / "ends.npy").tolist()
    documents = [(tokens[a:b], counted[a:b]) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    return Encoded(documents, **json.loads((place / FACTS).read_text()))


def _let_go(folder: Path, but: str) -> None:
    """Of what nobody has used for a while."""
    for path in folder.iterdir():
        with suppress(OSError):
            if not path.name.startswith(but) and time.time() - path.stat().st_mtime > UNUSED_SECONDS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
