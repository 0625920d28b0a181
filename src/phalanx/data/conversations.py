"""What people's rows say, as conversations: messages with a role and a content.

messages                      as they are
conversations                 likewise; messages may be ShareGPT's, with ``from`` and ``value``
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
LISTS = ("messages", "conversations")
SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "model": "assistant", "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip
"""Who a ShareGPT message is ``from``, as roles."""
PAIRS = (("prompt", "completion"), ("question", "answer"), ("instruction", "output"))


def conversation(row: Mapping[str, Any]) -> list[Message]:
    """A row's messages; the last is an answer. One that has none is refused."""
    listed = [column for column in LISTS if row.get(column) is not None]
    if listed:
        messages = _messages(row[listed[0]], listed[0])
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
    known = "; ".join((*LISTS, *(", ".join(pair) for pair in PAIRS)))
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
    for number, given in enumerate(value, start=1):
        message = _with_role(given, f"message {number} of {column}")
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise WrongUse(f"message {number} of {column} has no role")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise WrongUse(f"message {number} of {column} has no text as its content")
        found.append({name: item for name, item in message.items() if item is not None})
    return found


def _with_role(message: Any, which: str) -> Any:
    """One of ShareGPT's as one with a role and a content; any other as it is."""
    if not isinstance(message, Mapping) or "role" in message or "from" not in message:
        return message
    speaker = str(message["from"])
    if speaker not in SPEAKERS:
        raise WrongUse(f"{which} is from {speaker!r}, which is none of {', '.join(SPEAKERS)}")
    return {"role": SPEAKERS[speaker], "content": message.get("value")}


def _says(message: Message) -> bool:
    return bool(str(message.get("content", "")).strip() or message.get("tool_calls"))
