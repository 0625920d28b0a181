"""Rows that say what is preferred: their shapes, and what is wrong with them, named by file and row."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from phalanx.data.chat import Chat
from phalanx.data.chat_tokenizer import trained
from phalanx.data.preferences import AnsweredPrompt, Judged, PreferenceReader, Preferences, apart, judgements, pairs
from phalanx.data.row_file import RowFile
from phalanx.errors import WrongUse

pytest.importorskip("transformers", reason="transformers is not installed (the dev extra has it)")

TEXTS = ["Is water wet?", "Yes, it is.", "No, never.", "And ice?", "Only when it melts.", "Be short.", "Hello", "Hi!"]
USER, GOOD, BAD = (
    {"role": role, "content": text}
    for role, text in (("user", TEXTS[0]), ("assistant", TEXTS[1]), ("assistant", TEXTS[2]))
)


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(trained(TEXTS * 4, 300))


def read(
    folder: Path, chat: Chat, rows: list[Mapping[str, Any]], made: Callable[..., Preferences] = pairs,
    bad_rows: str = "stop", length: int = 64,
) -> Preferences:  # fmt: skip
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return made(RowFile(path), PreferenceReader(chat, length, len(chat.tokenizer)), bad_rows)


def words(chat: Chat, answer: AnsweredPrompt) -> tuple[str, str]:
    """All of it, and the part that counts."""
    return chat.tokenizer.decode(answer.ids), chat.tokenizer.decode(answer.ids[answer.counted])


ASKED = "<|user|>Is water wet?<|end|><|assistant|>"


@pytest.mark.parametrize("row", [
    {"prompt": TEXTS[0], "chosen": TEXTS[1], "rejected": TEXTS[2]},
    {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    {"prompt": [USER], "chosen": TEXTS[1], "rejected": TEXTS[2]},
])  # fmt: skip
def test_shapes_of_pairs(tmp_path: Path, chat: Chat, row: Mapping[str, Any]) -> None:
    ((chosen, rejected),) = read(tmp_path, chat, [row]).answers
    assert words(chat, chosen) == (f"{ASKED}Yes, it is.<|end|>", "Yes, it is.<|end|>")
    assert words(chat, rejected) == (f"{ASKED}No, never.<|end|>", "No, never.<|end|>")


def test_whole_texts_are_written_as_they_are(tmp_path: Path, chat: Chat) -> None:
    row = {"chosen": "Q: Hello A: Hi! Yes", "rejected": "Q: Hello A: Hi! No"}
    ((chosen, rejected),) = read(tmp_path, chat, [row]).answers
    assert words(chat, chosen) == ("Q: Hello A: Hi! Yes<|end|>", " Yes<|end|>")
    assert words(chat, rejected)[1] == " No<|end|>"


def test_answers_in_the_prompt_do_not_count(tmp_path: Path, chat: Chat) -> None:
    talk = [USER, GOOD, {"role": "user", "content": TEXTS[3]}]
    last = {"role": "assistant", "content": TEXTS[4]}
    ((chosen, _),) = read(tmp_path, chat, [{"chosen": [*talk, last], "rejected": [*talk, BAD]}]).answers
    assert words(chat, chosen)[1] == f"{TEXTS[4]}<|end|>"
    ((chosen, _),) = read(
        tmp_path, chat, [{"system": TEXTS[5], "prompt": talk, "chosen": [last], "rejected": [BAD]}]
    ).answers
    whole, counted = words(chat, chosen)
    assert whole.startswith("<|system|>Be short.<|end|><|user|>")
    assert counted == f"{TEXTS[4]}<|end|>"


def test_judged_rows_and_pairs_split(tmp_path: Path, chat: Chat) -> None:
    rows = [
        {"prompt": TEXTS[0], "completion": TEXTS[1], "label": True},
        {"prompt": [USER], "completion": [BAD], "label": 0},
    ]
    found = read(tmp_path, chat, rows, judgements).answers
    assert [(words(chat, each.answer)[1], each.good) for each in found if isinstance(each, Judged)] == [
        ("Yes, it is.<|end|>", True), ("No, never.<|end|>", False),
    ]  # fmt: skip
    pair = {"prompt": TEXTS[0], "chosen": TEXTS[1], "rejected": TEXTS[2]}
    other = {"prompt": TEXTS[3], "chosen": TEXTS[4], "rejected": TEXTS[2]}
    found = apart(read(tmp_path, chat, [pair, other], judgements).answers)
    assert [each.good for each in found] == [True, True, False, False]


@pytest.mark.parametrize(("row", "said"), [
    ({"prompt": "a", "chosen": "b"}, "it has no rejected: its columns are prompt, chosen"),
    ({"prompt": "Hello", "chosen": "Hi!", "rejected": "Hi!"}, "its chosen and rejected are the same"),
    ({"prompt": "Hello", "chosen": "Hi!", "rejected": " "}, "its rejected has no answer of the assistant's"),
    ({"prompt": 5, "chosen": "Hi!", "rejected": "No"}, "prompt is a number, not text"),
    ({"chosen": [USER], "rejected": [USER, BAD]}, "its chosen has no answer of the assistant's at its end"),
    ({"chosen": [{"content": "x"}], "rejected": [BAD]}, "message 1 of chosen has no role"),
    ({"prompt": "Hello " * 80, "chosen": "Hi!", "rejected": "No"}, "there is no answer within length=64 tokens"),
])  # fmt: skip
def test_bad_rows_are_named(tmp_path: Path, chat: Chat, row: Mapping[str, Any], said: str) -> None:
    good = {"prompt": TEXTS[0], "chosen": TEXTS[1], "rejected": TEXTS[2]}
    with pytest.raises(WrongUse) as refusal:
        read(tmp_path, chat, [good, row])
    assert f"{tmp_path}/rows.jsonl, row 2: {said}" in str(refusal.value)
    assert "bad_rows=skip" in str(refusal.value)
    found = read(tmp_path, chat, [good, row], bad_rows="skip")
    assert len(found.answers) == 1
    assert said in found.left_out


@pytest.mark.parametrize(("row", "said"), [
    ({"prompt": "a", "completion": "b"}, "it has no label"),
    ({"prompt": "a", "completion": "b", "label": "maybe"}, "its label is 'maybe', neither true nor false"),
    ({"prompt": "a", "completion": "", "label": True}, "its completion has no answer"),
])  # fmt: skip
def test_bad_judgements_are_named(tmp_path: Path, chat: Chat, row: Mapping[str, Any], said: str) -> None:
    good = {"prompt": TEXTS[0], "completion": TEXTS[1], "label": "false"}
    with pytest.raises(WrongUse, match=rf"rows.jsonl, row 2: {said}"):
        read(tmp_path, chat, [good, row], judgements)


def test_what_is_cut_off_is_counted(tmp_path: Path, chat: Chat) -> None:
    row = {"prompt": "Hello", "chosen": "Hi! " * 40, "rejected": "No"}
    found = read(tmp_path, chat, [row], length=24)
    assert found.cut == 1
    ((chosen, _),) = found.answers
    assert len(chosen.ids) == len(chosen.counted) == 24
    with pytest.raises(WrongUse, match="the same within length=24"):
        read(tmp_path, chat, [{"prompt": "Hello", "chosen": "Hi! " * 40, "rejected": "Hi! " * 41}], length=24)
