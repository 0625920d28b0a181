"""Encoded conversations as questions: all up to the last answer, and that answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from phalanx.data.supervised import Document
from phalanx.questions import Question, Questions


def asked(documents: Sequence[Document], tokenizer: Any, length: int, pad: int, shown: int) -> Questions:
    """Of conversations whose tokens count where they are answers; one that was cut off asks nothing."""
    ends = frozenset(int(token) for token in tokenizer.all_special_ids)

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()

    def every() -> Iterator[Question]:
        for ids, counted in documents:
            begin = _last_answer(counted)
            if begin > 0 and len(ids) < length:
                prompt = [int(token) for token in ids[:begin]]
                text = str(tokenizer.decode(prompt))
                yield Question(prompt, text, decode([int(token) for token in ids[begin:][counted[begin:]]]))

    return Questions(list(every()), decode, ends, length, pad, shown)


def _last_answer(counted: np.ndarray) -> int:
    """Where the last run of tokens that count begins; 0 where there is no question before it."""
    places = np.flatnonzero(counted)
    if not len(places):
        return 0
    breaks = np.flatnonzero(np.diff(places) > 1)
    return int(places[breaks[-1] + 1] if len(breaks) else places[0])
