"""What people's rows say, as conversations: messages with a role and a content.

messages                      as they are
prompt, completion            a question and its answer; either may be a list of messages
question, answer              likewise
instruction, input, output    likewise; the input, which may be missing, stands below the instruction

A column ``system`` stands before all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.errors import WrongUse

Message = dict[str, Any]
PAIRS = (("prompt", "completion"), ("question", "answer"), ("instruction", "output"))


def conversation(row: Mapping[str, Any]) -> list[Message]:
    """A row's messages; the last is an answer. One that has none is refused."""
    if row.get("messages") is not None:
        messages = _messages(row["messages"], "messages")
        while messages and messages[-1]["role"] != "assistant":
            messages.pop()  # nobody answers it
    else:
        asked, answered = _columns(row)
        question = row[asked]
        if asked == "instruction" and row.get("input") and isinstance(question, str):
            question = f"{question}\n\n{row['input']}"
        messages = said_by(question, "user", asked) + said_by(row[answered], "assistant", answered)
    messages = said_first(row) + messages
    if not any(_says(message) for message in messages if message["role"] == "assistant"):
        raise WrongUse("it has no answer to learn from: no message of the assistant's with a content")
    return messages


def said_first(row: Mapping[str, Any]) -> list[Message]:
    """What a column ``system`` says, if there is one."""
    if not row.get("system"):
        return []
    if not isinstance(row["system"], str):
        raise WrongUse(f"system is {_named(row['system'])}, not text")
    return [{"role": "system", "content": row["system"]}]


def _columns(row: Mapping[str, Any]) -> tuple[str, str]:
    for asked, answered in PAIRS:
        if asked in row and answered in row:
            return asked, answered
    for pair in PAIRS:
        for here, missing in (pair, pair[::-1]):
            if here in row:
                raise WrongUse(f"it has {here}, but no {missing}")
    known = "; ".join(("messages", *(", ".join(pair) for pair in PAIRS)))
    raise WrongUse(f"its columns are {', '.join(map(str, row)) or 'none'}, and none of these are there: {known}")


def said_by(value: Any, role: str, column: str) -> list[Message]:
    """What a column says as messages: they are there, or it is text of this role's."""
    if isinstance(value, str):
        return [{"role": role, "content": value}] if value.strip() else []
    if value is None:
        return []
    if not isinstance(value, (list, tuple)):
        raise WrongUse(f"{column} is {_named(value)}, not text")
    return _messages(value, column)


def _named(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    return "a number" if isinstance(value, (int, float)) else f"a {type(value).__name__}"


def _messages(value: Any, column: str) -> list[Message]:
    if not isinstance(value, (list, tuple)):
        raise WrongUse(f"{column} is a {type(value).__name__}, not a list of messages")
    found = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise WrongUse(f"message {number} of {column} has no role")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise WrongUse(f"message {number} of {column} has no text as its content")
        found.append({name: item for name, item in message.items() if item is not None})
    return found


def _says(message: Message) -> bool:
    return bool(str(message.get("content", "")).strip() or message.get("tool_calls"))
