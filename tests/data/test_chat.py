"""Which tokens of a conversation are answers, by a template's marks and turn by turn."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx import WrongUse
from phalanx.data.chat import Chat
from phalanx.data.chat_tokenizer import TEMPLATE, trained

pytest.importorskip("transformers", reason="transformers is not installed (the dev extra has it)")

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is blood?"},
    {"role": "assistant", "content": "A liquid."},
    {"role": "user", "content": "And bone?"},
    {"role": "assistant", "content": "A solid."},
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return trained([message["content"] for message in TALK] * 3, 300)


def counted(tokenizer: Any, template: str | None, **options: Any) -> str:
    tokenizer.chat_template = template
    ids, counts = Chat(tokenizer, **options).encode(TALK)
    assert len(ids) == len(counts)
    return tokenizer.decode(ids[counts])


@pytest.mark.parametrize("marks", ["auto", "template", "turns"])
def test_marks_and_turns_find_the_same_answers(tokenizer: Any, marks: str) -> None:
    assert counted(tokenizer, TEMPLATE, marks=marks) == "A liquid.<|end|>A solid.<|end|>"


def test_a_template_without_marks_is_followed_turn_by_turn(tokenizer: Any) -> None:
    assert counted(tokenizer, CHATML) == "A liquid.<|im_end|>A solid.<|im_end|>"
    assert counted(tokenizer, CHATML, loss_on="all").startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_without_a_template_text_is_plain(tokenizer: Any) -> None:
    assert counted(tokenizer, None) == "A liquid.<|end|>A solid.<|end|>"
    assert counted(tokenizer, None, loss_on="all").startswith("Be brief.What is blood?A liquid.<|end|>And")


def test_all_of_a_marked_template(tokenizer: Any) -> None:
    assert counted(tokenizer, TEMPLATE, loss_on="all").startswith("<|system|>Be brief.<|end|><|user|>What")


@pytest.mark.parametrize(("template", "marks", "words"), [
    (CHATML, "template", "has no {% generation %} in it"),
    ("{{ messages | length }}" + CHATML, "auto", "writes a conversation's beginning another way than the whole"),
    ("{{ raise_exception('roles must take turns') }}", "auto", "refuses it: TemplateError: roles must take turns"),
])  # fmt: skip
def test_answers_that_cannot_be_found_are_refused(tokenizer: Any, template: str, marks: str, words: str) -> None:
    with pytest.raises(WrongUse, match=words.replace("{", r"\{")):
        counted(tokenizer, template, marks=marks)
