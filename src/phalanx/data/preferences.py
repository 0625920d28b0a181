"""What people prefer, as rows say it: of two answers which is better, or of one answer whether it is good.

prompt, chosen, rejected     text, or lists of messages
chosen, rejected             whole conversations, or whole texts: what both begin with is the prompt
prompt, completion, label    one answer, and true or false

A column ``system`` stands before all others. Text that has a prompt of its own is a question and its answers; whole
texts are written as they are, without a chat template, and end with the tokenizer's end-of-text token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.data.chat import Chat
from phalanx.data.conversations import Message, said_by, said_first
from phalanx.data.row_file import RowFile
from phalanx.data.supervised import Document, fit_rows, fitting
from phalanx.errors import WrongUse
from phalanx.task import BadRows

CHOSEN, REJECTED = "chosen", "rejected"
TRUTHS = {"true": True, "false": False, "1": True, "0": False}
"""How CSV files write labels."""


@dataclass(frozen=True)
class AnsweredPrompt:
    """An answer after its prompt, as tokens."""

    ids: np.ndarray
    """Of both, cut off at the length of a sample."""
    counted: np.ndarray
    """Which of them are the answer's."""
    start: int
    """Where it begins: the prompt is before."""
    size: int
    """How many tokens there were before anything was cut off."""

    @property
    def document(self) -> Document:
        return self.ids, self.counted

    def after(self, prompt: AnsweredPrompt, length: int) -> Document:
        """The same answer behind another one's prompt."""
        ids = np.concatenate([prompt.ids[: prompt.start], self.ids[self.start :]])[:length]
        return ids, np.concatenate([np.zeros(prompt.start, dtype=bool), self.counted[self.start :]])[:length]


@dataclass(frozen=True)
class Judged:
    """An answer, and whether it is a good one."""

    answer: AnsweredPrompt
    good: bool


Pair = tuple[AnsweredPrompt, AnsweredPrompt]
"""The better one, and the worse."""


class PreferenceReader:
    """Rows to answers, by a tokenizer's chat template."""

    def __init__(self, chat: Chat, length: int, vocabulary: int) -> None:
        self.chat, self.length, self.vocabulary = chat, length, vocabulary

    def pair(self, row: Mapping[str, Any]) -> Pair:
        """The better answer of a row and the worse one."""
        prompt, answers, plain = _compared(row)
        prompt = said_first(row) + prompt
        for column, answer in answers.items():
            _check_answer(answer, column)
        if answers[CHOSEN] == answers[REJECTED]:
            raise WrongUse("its chosen and rejected are the same, so that neither is better")
        chosen, rejected = (self._answer(prompt, answers[column], plain) for column in (CHOSEN, REJECTED))
        if np.array_equal(chosen.ids, rejected.ids):
            raise WrongUse(f"its chosen and rejected are the same within length={self.length} tokens")
        return chosen, rejected

    def judged(self, row: Mapping[str, Any]) -> Judged:
        """A row's answer, and whether it is good."""
        for column in ("prompt", "completion", "label"):
            if row.get(column) is None:
                raise WrongUse(f"it has no {column}: each row needs prompt, completion and label")
        label = row["label"]
        truth = TRUTHS.get(label.strip().lower()) if isinstance(label, str) else label
        if not isinstance(truth, (bool, np.bool_)) and truth not in (0, 1):
            raise WrongUse(f"its label is {label!r}, neither true nor false")
        answer = said_by(row["completion"], "assistant", "completion")
        _check_answer(answer, "completion")
        prompt = said_first(row) + said_by(row["prompt"], "user", "prompt")
        return Judged(self._answer(prompt, answer, plain=False), bool(truth))

    def _answer(self, prompt: Sequence[Message], answer: Sequence[Message], plain: bool) -> AnsweredPrompt:
        ids, counted = self.chat.encode([*prompt, *answer], plain)
        start = _common(self.chat.asked(prompt, plain), ids)
        counted[:start] = False
        ids, counted = fitting(ids, counted, self.length, self.vocabulary)
        return AnsweredPrompt(ids[: self.length], counted[: self.length], start, len(ids))


def _common(some: Sequence[Any] | np.ndarray, others: Sequence[Any] | np.ndarray) -> int:
    """How much of their beginnings is the same."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(some), len(others)))


def _compared(row: Mapping[str, Any]) -> tuple[list[Message], dict[str, list[Message]], bool]:
    """A row's prompt and its two answers; whether they are plain text."""
    for column in (CHOSEN, REJECTED):
        if row.get(column) is None:
            columns = ", ".join(map(str, row)) or "none"
            raise WrongUse(f"it has no {column}: its columns are {columns}, and each row needs chosen and rejected")
    chosen, rejected = row[CHOSEN], row[REJECTED]
    if row.get("prompt") is not None:
        answers = {column: said_by(row[column], "assistant", column) for column in (CHOSEN, REJECTED)}
        return said_by(row["prompt"], "user", "prompt"), answers, False
    if isinstance(chosen, str) and isinstance(rejected, str):
        begin = _common(chosen, rejected)
        begin -= begin > 0 and chosen[begin - 1] == " "  # a space is the answers', as tokenizers have it
        rests = {CHOSEN: chosen[begin:], REJECTED: rejected[begin:]}
        answers = {column: [{"role": "assistant", "content": rest}] for column, rest in rests.items()}
        return ([{"role": "user", "content": chosen[:begin]}] if begin else []), answers, True
    one, other = (said_by(value, "assistant", column) for value, column in ((chosen, CHOSEN), (rejected, REJECTED)))
    begin = _common(one, other)
    return one[:begin], {CHOSEN: one[begin:], REJECTED: other[begin:]}, False


def _check_answer(messages: Sequence[Message], column: str) -> None:
    if not messages or messages[-1]["role"] != "assistant" or not str(messages[-1].get("content", "")).strip():
        raise WrongUse(f"its {column} has no answer of the assistant's at its end")


@dataclass(frozen=True)
class Preferences:
    """The rows of a file as answers, and what became of the others."""

    answers: list[Pair] | list[Judged]
    rows: int
    left_out: str
    """Which are not here, and why; empty: all are."""
    cut: int
    """How many answers were longer than they may be, and are cut off."""


def pairs(rows: RowFile, reader: PreferenceReader, bad_rows: BadRows) -> Preferences:
    """Each row's two answers; bad rows end it, or are left out and named."""
    found, left_out, _ = fit_rows(rows, reader.pair, bad_rows)
    return Preferences(found, len(rows), left_out, _cut([answer for pair in found for answer in pair]))


def judgements(rows: RowFile, reader: PreferenceReader, bad_rows: BadRows) -> Preferences:
    """Each row's answer and whether it is good, or its two answers, to be taken `apart`."""
    if _are_pairs(rows):
        return pairs(rows, reader, bad_rows)
    found, left_out, _ = fit_rows(rows, reader.judged, bad_rows)
    return Preferences(found, len(rows), left_out, _cut([each.answer for each in found]))


def apart(answers: Sequence[Pair] | Sequence[Judged]) -> list[Judged]:
    """Answers one by one; of pairs first all that are better, then all that are worse."""
    judged = [each for each in answers if isinstance(each, Judged)]
    of_pairs = [each for each in answers if not isinstance(each, Judged)]
    return judged + [Judged(pair[place], good) for place, good in ((0, True), (1, False)) for pair in of_pairs]


def _are_pairs(rows: RowFile) -> bool:
    """By the first row that can be read."""
    for index in range(len(rows)):
        try:
            return "label" not in rows[index]
        except WrongUse:
            continue
    return False


def _cut(answers: Sequence[AnsweredPrompt]) -> int:
    return sum(answer.size > len(answer.ids) for answer in answers)
