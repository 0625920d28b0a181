"""Conversations to train on: encoded, and each a sample, or several packed into samples of one length.

A sample has ``tokens``; ``targets``, the next token where it counts and -100 where it does not; ``positions``, counted
from its conversation's start; and ``documents``, which conversation each token is from, -1 where there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from phalanx import streams
from phalanx.data.best_fit import best_fit
from phalanx.data.chat import Chat
from phalanx.data.conversations import conversation
from phalanx.data.packing import IGNORE
from phalanx.data.row_file import RowFile
from phalanx.errors import WrongUse
from phalanx.events import say
from phalanx.words import listed, many

BadRows = Literal["stop", "skip"]
Document = tuple[np.ndarray, np.ndarray]
FILLS = {"tokens": 0, "targets": IGNORE, "positions": 0, "documents": -1}
SHOWN = 3


def encoded(
    rows: RowFile, chat: Chat, length: int, vocabulary: int, bad_rows: BadRows = "stop", tell: bool = True
) -> list[Document]:
    """Each row's tokens, cut off at ``length``, and which of them count; bad rows end it, or are left out and named."""
    documents, skipped, cut = [], [], 0
    for index in range(len(rows)):
        try:
            ids, counted = _document(rows, index, chat, length, vocabulary)
        except WrongUse as error:
            if bad_rows == "stop":
                raise
            skipped.append(str(error))
            continue
        cut += len(ids) > length
        documents.append((ids[:length], counted[:length]))
    if skipped:
        say(f"   note  {many(len(skipped), 'row')} left out: {listed(skipped, SHOWN)}", streams.stderr())
    if cut and tell:
        say(f"   note  {many(cut, 'row')} of {rows.path} cut off at length={length} tokens", streams.stderr())
    if not documents:
        raise WrongUse(f"{rows.path} has no row to train on. Mend what is said of them above, or give another file.")
    return documents


def _document(rows: RowFile, index: int, chat: Chat, length: int, vocabulary: int) -> Document:
    row = rows[index]
    try:
        ids, counted = chat.encode(conversation(row))
    except WrongUse as error:
        raise WrongUse(f"{rows.place(index)}: {error}. Mend or remove it, or set bad_rows=skip.") from None
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise WrongUse(
            f"{rows.place(index)}: it has the token {int(ids.max())}, and the model's vocabulary has {vocabulary}. "
            "Use the model's own tokenizer, or set bad_rows=skip."
        )
    if not counted[1:length].any():  # nothing predicts the first token
        why = f"within length={length} tokens of its {len(ids)}" if counted[1:].any() else "in its tokens"
        raise WrongUse(f"{rows.place(index)}: there is no answer {why}. Set a larger length, or bad_rows=skip.")
    return ids, counted


class Supervised:
    """Samples of encoded conversations: one each, or with a ``length`` as many as fit, none of them cut in two."""

    def __init__(self, documents: Sequence[Document], length: int | None = None, pad: int = 0) -> None:
        self.documents, self.length, self.pad = documents, length, pad
        sizes = [len(ids) for ids, _ in documents]
        self.places = [[number] for number in range(len(sizes))] if length is None else best_fit(sizes, length)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        parts = [_columns(*self.documents[number], place) for place, number in enumerate(self.places[index])]
        whole = {name: np.concatenate([part[name] for part in parts]) for name in FILLS}
        sample = {name: torch.from_numpy(column) for name, column in whole.items()}
        return sample if self.length is None else padded(sample, self.length, self.pad)


def _columns(ids: np.ndarray, counted: np.ndarray, place: int) -> dict[str, np.ndarray]:
    targets = np.full(len(ids), IGNORE, dtype=np.int64)
    targets[:-1] = np.where(counted[1:], ids[1:], IGNORE)
    return {
        "tokens": ids,
        "targets": targets,
        "positions": np.arange(len(ids), dtype=np.int64),
        "documents": np.full(len(ids), place, dtype=np.int64),
    }


def padded(sample: Mapping[str, Tensor], length: int, pad: int) -> dict[str, Tensor]:
    """A sample filled up to a length with what does not count."""
    fills = FILLS | {"tokens": pad}
    return {
        name: torch.nn.functional.pad(column, (0, length - len(column)), value=fills[name])
        for name, column in sample.items()
    }


def padded_together(samples: Sequence[Mapping[str, Any]], pad: int) -> dict[str, Tensor]:
    """Samples of different lengths as one batch, as long as the longest."""
    longest = max(len(sample["tokens"]) for sample in samples)
    filled = [padded(sample, longest, pad) for sample in samples]
    return {name: torch.stack([sample[name] for sample in filled]) for name in FILLS}
