"""Rows of every kind as messages."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx import WrongUse
from phalanx.data.conversations import conversation

ASKED, ANSWERED = {"role": "user", "content": "why?"}, {"role": "assistant", "content": "so."}


@pytest.mark.parametrize("row", [
    {"messages": [ASKED, ANSWERED]},
    {"messages": [ASKED, ANSWERED, {"role": "user", "content": "and?"}]},
    {"conversations": [ASKED, ANSWERED]},
    {"conversations": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "so.", "weight": None}], "id": "a"},
    {"messages": [{"from": "user", "value": "why?"}, {"from": "assistant", "value": "so."}]},
    {"messages": None, "conversations": [ASKED, ANSWERED, {"from": "human", "value": "and?"}]},
    {"prompt": "why?", "completion": "so."},
    {"prompt": [ASKED], "completion": [ANSWERED]},
    {"question": "why?", "answer": "so.", "source": "a book"},
    {"instruction": "why?", "input": "", "output": "so."},
])  # fmt: skip
def test_all_say_the_same(row: dict[str, Any]) -> None:
    assert conversation(row) == [ASKED, ANSWERED]


def test_an_input_stands_below_its_instruction_and_a_system_before_all() -> None:
    row = {"instruction": "Add.", "input": "1, 2", "output": "3", "system": "Be brief."}
    assert [message["content"] for message in conversation(row)] == ["Be brief.", "Add.\n\n1, 2", "3"]


@pytest.mark.parametrize(("row", "words"), [
    ({"text": "hello"}, "columns are text, and none of these are there: messages; conversations; prompt, completion"),
    ({"question": "why?"}, "it has question, but no answer"),
    ({"output": "so."}, "it has output, but no instruction"),
    ({"question": "why?", "answer": 5}, "answer is a number, not text"),
    ({"question": "why?", "answer": "so.", "system": True}, "system is true or false, not text"),
    ({"question": "why?", "answer": " "}, "no answer to learn from"),
    ({"question": "why?", "answer": None}, "no answer to learn from"),
    ({"messages": [ASKED]}, "no answer to learn from"),
    ({"messages": "why?"}, "messages is a str, not a list of messages"),
    ({"messages": [ASKED, {"content": "so."}]}, "message 2 of messages has no role"),
    ({"conversations": [ASKED, {"value": "so."}]}, "message 2 of conversations has no role"),
    ({"conversations": [{"from": "alice", "value": "so."}]}, "conversations is from 'alice', which is none of human"),
    ({"conversations": [{"from": "gpt", "value": 3}]}, "message 1 of conversations has no text"),
    ({"conversations": [{"from": "human", "value": "why?"}]}, "no answer to learn from"),
    ({"messages": [ASKED, {"role": "assistant", "content": 3}]}, "message 2 of messages has no text"),
])  # fmt: skip
def test_what_teaches_nothing_is_refused(row: dict[str, Any], words: str) -> None:
    with pytest.raises(WrongUse, match=words):
        conversation(row)
