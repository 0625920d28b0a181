"""Conversations as tokens, by the tokenizer's chat template, and which of them are answers.

A template marks answers itself, between ``{% generation %}`` and ``{% endgeneration %}``; otherwise they are found turn
by turn: what the template adds to a conversation's beginning when an answer is added is that answer. A tokenizer
without a template gets plain text: the messages one after another, and its end-of-text token after each answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from phalanx.data.conversations import Message
from phalanx.errors import WrongUse

Marks = Literal["auto", "template", "turns"]
LossOn = Literal["answers", "all"]
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Chat:
    """A tokenizer, and how its conversations are written and marked."""

    def __init__(self, tokenizer: Any, loss_on: LossOn = "answers", marks: Marks = "auto") -> None:
        self.tokenizer, self.loss_on = tokenizer, loss_on
        template = tokenizer.chat_template
        marked = isinstance(template, str) and GENERATION.search(template) is not None
        if marks == "template" and not marked:
            raise WrongUse(
                "marks=template, and the tokenizer's chat template has no {% generation %} in it. Put it around the "
                "answers (chat_template=FILE), or set marks=turns."
            )
        if not getattr(tokenizer, "is_fast", False):
            raise WrongUse(
                f"{type(tokenizer).__name__} does not say which characters a token comes from, so answers cannot be "
                "found. Use its fast version, a folder with a tokenizer.json."
            )
        self.by_template = marked and marks != "turns"

    def encode(self, messages: Sequence[Message], plain: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of a conversation, and which of them count in the loss. ``plain``: written without a template."""
        if self.tokenizer.chat_template is None or plain:
            text, spans = self._plainly(messages)
        elif self.by_template:
            return self._by_template(messages)
        else:
            text, spans = self._by_turns(messages)
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = np.asarray(found["input_ids"], dtype=np.int64)
        if self.loss_on == "all":
            return ids, np.ones(len(ids), dtype=bool)
        begins, ends = np.asarray(found["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
        counted = np.zeros(len(ids), dtype=bool)
        for start, stop in spans:
            counted |= (ends > start) & (begins < stop)
        return ids, counted

    def asked(self, messages: Sequence[Message], plain: bool = False) -> np.ndarray:
        """The tokens of what an answer is to follow, up to where it begins."""
        if self.tokenizer.chat_template is None or plain:
            text = self._plainly(messages)[0]
        else:
            text = self._templated(messages, add_generation_prompt=True) if messages else ""
        return np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)

    def _by_template(self, messages: Sequence[Message]) -> tuple[np.ndarray, np.ndarray]:
        found = self._templated(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids, counted = (np.asarray(found[name], dtype=np.int64) for name in ("input_ids", "assistant_masks"))
        return ids, counted.astype(bool) | (self.loss_on == "all")

    def _templated(self, messages: Sequence[Message], **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(list(messages), **{"tokenize": False, **options})
        except Exception as error:  # a template refuses in its own words: roles that do not take turns, tools
            raise WrongUse(f"the chat template refuses it: {type(error).__name__}: {error}") from error

    def _by_turns(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        text, spans = self._templated(messages), []
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or self.loss_on == "all":
                continue
            before = self._templated(messages[:number], add_generation_prompt=True)
            through = self._templated(messages[: number + 1])
            if not text.startswith(before) or not text.startswith(through) or len(through) <= len(before):
                raise WrongUse(
                    f"its answer {number + 1} cannot be found: the chat template writes a conversation's beginning "
                    "another way than the whole. Put {% generation %} around the answers in it (chat_template=FILE), "
                    "or set loss_on=all"
                )
            spans.append((len(before), _end(through, str(message.get("content", "")))))
        return text, spans

    def _plainly(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        text, spans, end = "", [], self.tokenizer.eos_token or ""
        for message in messages:
            start = len(text)
            text += str(message.get("content", ""))
            if message["role"] == "assistant":
                text += end
                spans.append((start, len(text)))
        return text, spans


def _end(text: str, content: str) -> int:
    """Where an answer ends: with the mark that follows its content; the line's end after that is nobody's answer."""
    stripped = text.rstrip()
    return len(text) if stripped.endswith(content.rstrip()) else len(stripped)
