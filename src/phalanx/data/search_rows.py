"""Rows to learn search from: a query, a text that answers it, and texts that look like an answer and are none.

A sample has ``tokens`` of all its texts: the query, its positive, its hard negatives; and ``ids``: equal numbers are
equal texts, and -1 stands for a negative that the row does not have. A batch also has
``lengths``: how many tokens of each text count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.data.row_file import RowFile
from phalanx.data.rows import BadRow
from phalanx.errors import WrongUse
from phalanx.task import BadRows
from phalanx.words import listed, many

QUERY, POSITIVE, NEGATIVE = ("query", "anchor", "question"), ("positive", "answer"), "negative"
"""Names that columns may have; negatives are in all that begin so, a text or a list of them each."""
ABSENT = -1
SHOWN = 3

Encode = Callable[[list[str]], list[list[int]]]
"""From texts to their tokens."""


@dataclass(frozen=True)
class Texts:
    """What a row says."""

    query: str
    positive: str
    negatives: tuple[str, ...]


def texts_of(row: Mapping[str, Any]) -> Texts:
    """The texts of a row; what is missing, or no text, is refused."""
    query, positive = (_one(row, names) for names in (QUERY, POSITIVE))
    negatives: list[str] = []
    for name in [name for name in row if name.startswith(NEGATIVE)]:
        for value in row[name] if isinstance(row[name], (list, tuple)) else [row[name]]:
            if value is not None and value != "":  # as tables have where a row has fewer
                negatives.append(_text(value, name))
    return Texts(query, positive, tuple(negatives))


def _one(row: Mapping[str, Any], names: tuple[str, ...]) -> str:
    found = [name for name in names if row.get(name) is not None]
    if not found:
        columns = ", ".join(map(str, row)) or "none"
        raise WrongUse(f"it has no {names[0]}: its columns are {columns}, and each row needs one of {', '.join(names)}")
    if len(found) > 1:
        raise WrongUse(f"it has {' and '.join(found)}, of which one is meant")
    return _text(row[found[0]], found[0])


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise WrongUse(f"its {name} is a {type(value).__name__}, not a text")
    if not value.strip():
        raise WrongUse(f"its {name} is empty")
    return value


@dataclass(frozen=True)
class Read:
    """The good rows of a file, and what became of the others."""

    rows: list[Texts]
    size: int
    """How many the file has."""
    left_out: str
    """Which are not here, and why; empty: all are."""


def read(file: RowFile, bad_rows: BadRows = "stop") -> Read:
    """All rows; bad ones end it, or are left out and named."""
    found, skipped = [], dict[str, list[str]]()
    for index in range(len(file)):
        try:
            found.append(texts_of(file[index]))
        except WrongUse as error:
            reason, number = error.reason if isinstance(error, BadRow) else str(error), f"{file.number(index):,}"
            if bad_rows == "stop":
                raise WrongUse(
                    f"{file.path}, row {number}: {reason}. Mend or remove it, or set bad_rows=skip."
                ) from None
            skipped.setdefault(reason, []).append(number)
    told = [f"{'row' if len(each) == 1 else 'rows'} {listed(each, SHOWN)}: {why}" for why, each in skipped.items()]
    more = f"; and {many(len(told) - SHOWN, 'other reason')}" if len(told) > SHOWN else ""
    left_out = "; ".join(told[:SHOWN]) + more
    if not found:
        raise WrongUse(f"{file.path} has no row to train on: {left_out}. Mend them, or give another file.")
    return Read(found, len(file), left_out and f"{file.path}, {left_out}")


class SearchRows:
    """Samples of rows; every text is encoded once."""

    def __init__(self, rows: Sequence[Texts], encode: Encode, negatives: int, prompts: tuple[str, str]) -> None:
        """``negatives``: how many hard ones a sample has, at most. ``prompts`` stand before queries and texts."""
        self.rows = rows
        self.texts = 2 + min(negatives, max(len(row.negatives) for row in rows))
        numbers: dict[str, int] = {}
        self._ids: list[list[int]] = []
        for row in rows:
            each = [prompts[0] + row.query, prompts[1] + row.positive]
            each += [prompts[1] + text for text in row.negatives[: self.texts - 2]]
            known = [numbers.setdefault(text, len(numbers)) for text in each]
            self._ids.append(known + [ABSENT] * (self.texts - len(known)))
        self._tokens = [torch.tensor(tokens) for tokens in encode(list(numbers))]

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def longest(self) -> int:
        return max(map(len, self._tokens))

    @property
    def largest(self) -> int:
        """The largest token that occurs."""
        return max(int(tokens.max()) for tokens in self._tokens if len(tokens))

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        ids = self._ids[index]
        none = torch.zeros(0, dtype=torch.int64)
        tokens = [none if number == ABSENT else self._tokens[number] for number in ids]
        return {"tokens": tokens, "ids": torch.tensor(ids)}


def padded_together(samples: Sequence[Mapping[str, Any]], pad: int) -> dict[str, Tensor]:
    """Samples as one batch, all texts as long as the longest; one that is missing is a single token."""
    longest = max(1, *(len(tokens) for sample in samples for tokens in sample["tokens"]))
    shape = len(samples), len(samples[0]["tokens"])
    tokens, lengths = torch.full((*shape, longest), pad), torch.ones(shape, dtype=torch.int64)
    for row, sample in enumerate(samples):
        for place, own in enumerate(sample["tokens"]):
            tokens[row, place, : len(own)] = own
            lengths[row, place] = max(1, len(own))
    return {"tokens": tokens, "lengths": lengths, "ids": torch.stack([sample["ids"] for sample in samples])}
