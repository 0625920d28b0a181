"""Encoded conversations as questions: all up to the last answer, and that answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, overload

import numpy as np

from phalanx.data.conversations import conversation
from phalanx.data.row_file import RowFile
from phalanx.data.supervised import Document
from phalanx.questions import Question, Questions


class LastAnswers(Sequence[Question]):
    """The last answers of conversations as questions, each made when it is asked for."""

    def __init__(
        self, documents: Sequence[Document], tokenizer: Any, length: int, words: Callable[[int], str] | None = None
    ) -> None:
        """``words``: by a document's number, its last question as its author wrote it; without, the prompt."""
        self.documents, self.tokenizer, self.words = documents, tokenizer, words
        whole = [(number, counted) for number, (ids, counted) in enumerate(documents) if len(ids) < length]
        begins = ((number, _last_answer(counted)) for number, counted in whole)
        self.places = [(number, begin) for number, begin in begins if begin > 0]
        """Documents that ask something, and where the answer to it begins."""

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> Question: ...

    @overload
    def __getitem__(self, index: slice) -> list[Question]: ...

    def __getitem__(self, index: int | slice) -> Question | list[Question]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        number, begin = self.places[index]
        ids, counted = self.documents[number]
        prompt = [int(token) for token in ids[:begin]]
        answer = [int(token) for token in ids[begin:][counted[begin:]]]
        text = str(self.tokenizer.decode(prompt))
        own = text if self.words is None else self.words(number)
        return Question(prompt, own, _decoded(self.tokenizer, answer), text)


class LastQuestions:
    """Of rows of a file, the last question of each, as it stands there."""

    def __init__(self, path: str | Path, numbers: Sequence[int]) -> None:
        """``numbers``: which row each document is from."""
        self.path, self.numbers = path, numbers

    @cached_property
    def _rows(self) -> RowFile:
        return RowFile(self.path)

    def __call__(self, number: int) -> str:
        messages = conversation(self._rows[self.numbers[number]])
        last = max(place for place, message in enumerate(messages) if message["role"] == "assistant")
        said = [message["content"] for message in messages[:last] if message["role"] == "user"]
        return said[-1] if said else "\n".join(message["content"] for message in messages[:last])


def asked(
    documents: Sequence[Document], tokenizer: Any, length: int, pad: int, shown: int,
    words: Callable[[int], str] | None = None,
) -> Questions:  # fmt: skip
    """Of conversations whose tokens count where they are answers; one that was cut off asks nothing."""
    ends = frozenset(int(token) for token in tokenizer.all_special_ids)
    every = LastAnswers(documents, tokenizer, length, words)
    return Questions(every, partial(_decoded, tokenizer), ends, length, pad, shown)


def _decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()


def _last_answer(counted: np.ndarray) -> int:
    """Where the last run of tokens that count begins; 0 where there is no question before it."""
    places = np.flatnonzero(counted)
    if not len(places):
        return 0
    breaks = np.flatnonzero(np.diff(places) > 1)
    return int(places[breaks[-1] + 1] if len(breaks) else places[0])
