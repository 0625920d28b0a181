"""Encoded conversations as questions: all up to the last answer, and that answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, overload

import numpy as np

from phalanx.data.supervised import Document
from phalanx.questions import Question, Questions


class LastAnswers(Sequence[Question]):
    """The last answers of conversations as questions, each made when it is asked for."""

    def __init__(self, documents: Sequence[Document], tokenizer: Any, length: int) -> None:
        self.documents, self.tokenizer = documents, tokenizer
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
        return Question(prompt, str(self.tokenizer.decode(prompt)), _decoded(self.tokenizer, answer))


def asked(documents: Sequence[Document], tokenizer: Any, length: int, pad: int, shown: int) -> Questions:
    """Of conversations whose tokens count where they are answers; one that was cut off asks nothing."""
    ends = frozenset(int(token) for token in tokenizer.all_special_ids)
    return Questions(LastAnswers(documents, tokenizer, length), partial(_decoded, tokenizer), ends, length, pad, shown)


def _decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()


def _last_answer(counted: np.ndarray) -> int:
    """Where the last run of tokens that count begins; 0 where there is no question before it."""
    places = np.flatnonzero(counted)
    if not len(places):
        return 0
    breaks = np.flatnonzero(np.diff(places) > 1)
    return int(places[breaks[-1] + 1] if len(breaks) else places[0])
