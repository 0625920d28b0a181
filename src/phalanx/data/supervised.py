"""Conversations to train on: encoded, and each a sample, or several packed into samples of one length.

A sample has ``tokens``; ``targets``, the next token where it counts and -100 where it does not; ``positions``, counted
from its conversation's start; and ``documents``, which conversation each token is from, -1 where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from phalanx.data.best_fit import best_fit
from phalanx.data.chat import Chat
from phalanx.data.conversations import conversation
from phalanx.data.order import Order
from phalanx.data.packing import IGNORE
from phalanx.data.row_file import RowFile
from phalanx.data.rows import BadRow
from phalanx.errors import WrongUse
from phalanx.task import BadRows
from phalanx.words import listed, many

Document = tuple[np.ndarray, np.ndarray]
Made = TypeVar("Made")
FILLS = {"tokens": 0, "targets": IGNORE, "positions": 0, "documents": -1}
SHOWN = 3


class Unfit(WrongUse):
    """Why a row cannot be trained on, and what to do."""

    def __init__(self, reason: str, advice: str = "Mend or remove it") -> None:
        super().__init__(reason)
        self.reason, self.advice = reason, advice


@dataclass(frozen=True)
class Encoded:
    """The rows of a file as tokens, and what became of the others."""

    documents: list[Document]
    rows: int
    """How many the file has."""
    left_out: str
    """Which are not here, and why; empty: all are."""
    cut: int
    """How many were longer than they may be, and are cut off."""
    kept: list[int]
    """Which row each document is from."""


def encoded(rows: RowFile, chat: Chat, length: int, vocabulary: int, bad_rows: BadRows = "stop") -> Encoded:
    """Each row's tokens, cut off at ``length``, and which of them count; bad rows end it, or are left out and named."""
    found, left_out, kept = fit_rows(
        rows, lambda row: fitting(*chat.encode(conversation(row)), length, vocabulary), bad_rows
    )  # fmt: skip
    documents = [(ids[:length], counted[:length]) for ids, counted in found]
    return Encoded(documents, len(rows), left_out, sum(len(ids) > length for ids, _ in found), kept)


def fit_rows(
    rows: RowFile, make: Callable[[dict[str, Any]], Made], bad_rows: BadRows
) -> tuple[list[Made], str, list[int]]:
    """What is made of each row, which are left out and why, and which are not; a bad row ends it, or is left out."""
    found, kept, skipped = list[Made](), list[int](), dict[str, list[str]]()
    for index in range(len(rows)):
        try:
            found.append(_made(rows, index, make))
            kept.append(index)
        except Unfit as error:
            number = f"{rows.number(index):,}"
            if bad_rows == "stop":
                raise WrongUse(
                    f"{rows.path}, row {number}: {error.reason}. {error.advice}, or set bad_rows=skip."
                ) from None
            skipped.setdefault(error.reason, []).append(number)
    left_out = _told(skipped)
    if not found:
        raise WrongUse(f"{rows.path} has no row to train on: {left_out}. Mend them, or give another file.")
    return found, left_out and f"{rows.path}, {left_out}", kept


def _told(skipped: Mapping[str, Sequence[str]]) -> str:
    """``rows 2, 5: it has no answer; row 7: not JSON``."""
    each = [f"{'row' if len(n) == 1 else 'rows'} {listed(n, SHOWN)}: {reason}" for reason, n in skipped.items()]
    more = f"; and {many(len(each) - SHOWN, 'other reason')}" if len(each) > SHOWN else ""
    return "; ".join(each[:SHOWN]) + more


def _made(rows: RowFile, index: int, make: Callable[[dict[str, Any]], Made]) -> Made:
    try:
        return make(rows[index])
    except Unfit:
        raise
    except BadRow as error:
        raise Unfit(error.reason) from None
    except WrongUse as error:
        raise Unfit(str(error)) from None


def fitting(ids: np.ndarray, counted: np.ndarray, length: int, vocabulary: int) -> Document:
    """The tokens of a row and which of them count, if a model can learn from them."""
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise Unfit(
            f"it has the token {int(ids.max())}, and the model's vocabulary has {vocabulary}",
            "Use the model's own tokenizer",
        )
    if not counted[1:length].any():  # nothing predicts the first token
        why = f"within length={length} tokens of its {len(ids)}" if counted[1:].any() else "in its tokens"
        raise Unfit(f"there is no answer {why}", "Set a larger length")
    return ids, counted


class Supervised:
    """Samples of encoded conversations: one each, or with a ``length`` as many as fit, none of them cut in two."""

    def __init__(self, documents: Sequence[Document], length: int | None = None, pad: int = 0) -> None:
        self.documents, self.length, self.pad = documents, length, pad
        sizes = [len(ids) for ids, _ in documents]
        self.places = [[number] for number in range(len(sizes))] if length is None else best_fit(sizes, length)

    def __len__(self) -> int:
        return len(self.places)

    def training_order(self, global_batch: int, seed: int) -> Order:
        """As of any data; where too few samples are left of packing, that is said."""
        rows, size = len(self.documents), len(self)
        if self.length is not None and size < global_batch:
            raise WrongUse(
                f"{many(rows, 'row')} packed into samples of length={self.length} tokens make {size:,}, fewer than one "
                f"batch of {global_batch}. Set a smaller length, packed=false, or global_batch={size}."
            )
        return Order(size, global_batch, seed)

    def describe(self) -> str:
        """How many rows became how many samples, and how many of their tokens have a loss."""
        into = "a sample each" if self.length is None else f"packed into {many(len(self), 'sample')} of {self.length}"
        sizes = [len(ids) for ids, _ in self.documents]
        tokens, counted = sum(sizes), sum(int(counts[1:].sum()) for _, counts in self.documents)
        return (
            f"{len(self.documents):,} {into}, {counted:,} of {many(tokens, 'token')} have a loss, the longest row "
            f"has {max(sizes):,}"
        )

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        parts = [columns(*self.documents[number], place) for place, number in enumerate(self.places[index])]
        whole = {name: np.concatenate([part[name] for part in parts]) for name in FILLS}
        sample = {name: torch.from_numpy(column) for name, column in whole.items()}
        return sample if self.length is None else padded(sample, self.length, self.pad)


def columns(ids: np.ndarray, counted: np.ndarray, place: int = 0) -> dict[str, np.ndarray]:
    """A document's tokens, and what each of them is to predict."""
    targets = np.full(len(ids), IGNORE, dtype=np.int64)
    targets[:-1] = np.where(counted[1:], ids[1:], IGNORE)
    return {
        "tokens": ids,
        "targets": targets,
        "positions": np.arange(len(ids), dtype=np.int64),
        "documents": np.full(len(ids), place, dtype=np.int64),
    }


def padded(sample: Mapping[str, Tensor], length: int, pad: int) -> dict[str, Tensor]:
    """A sample filled up to a length with what does not count: one more document, so that positions go on there."""
    fills, more = FILLS | {"tokens": pad}, length - len(sample["tokens"])
    found = {name: torch.nn.functional.pad(column, (0, more), value=fills[name]) for name, column in sample.items()}
    return found | {"positions": torch.cat([sample["positions"], torch.arange(more)])}


def padded_together(samples: Sequence[Mapping[str, Any]], pad: int) -> dict[str, Tensor]:
    """Samples of different lengths as one batch, as long as the longest."""
    longest = max(len(sample["tokens"]) for sample in samples)
    filled = [padded(sample, longest, pad) for sample in samples]
    return {name: torch.stack([sample[name] for sample in filled]) for name in FILLS}
