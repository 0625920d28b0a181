"""Questions made of encoded conversations."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from phalanx.data.asked import LastQuestions, asked


class Letters:
    """A tokenizer of letters, of which 0 is special."""

    all_special_ids = (0,)

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "".join("." if token == 0 else chr(96 + token) for token in tokens if token or not skip_special_tokens)


def document(tokens: list[int], counted: list[int]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(tokens), np.array(counted, dtype=bool)


def test_the_last_answer_is_asked_for() -> None:
    several = document([1, 2, 3, 0, 4, 5, 6, 0], [0, 0, 1, 1, 0, 0, 1, 1])
    found = asked([several], Letters(), length=20, pad=0, shown=2)
    (question,) = found.every
    assert (question.tokens, question.text, question.reference) == ([1, 2, 3, 0, 4, 5], "abc.de", "f")
    assert (found.ends, found.shown) == (frozenset([0]), 2)


def test_what_was_cut_off_or_has_no_question_is_not() -> None:
    whole, cut = document([1, 2, 3], [1, 1, 1]), document([1, 2, 3, 4], [0, 1, 1, 1])
    nothing = document([1, 2], [0, 0])
    assert not asked([whole, cut, nothing], Letters(), length=4, pad=0, shown=1).every


def test_those_alone_are_made_that_are_asked_for() -> None:
    class Counted(Letters):
        calls = 0

        def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
            self.calls += 1
            return super().decode(tokens, skip_special_tokens)

    tokenizer = Counted()
    documents = [document([1, 2, number, 0], [0, 0, 1, 1]) for number in range(1, 20)]
    found = asked(documents, tokenizer, length=20, pad=0, shown=2)
    assert len(found.every) == 19
    assert tokenizer.calls == 0
    assert [question.reference for question in found.every[:2]] == ["a", "b"]
    assert tokenizer.calls == 4
    assert found.every[-1].reference == "s"


def test_a_question_is_in_its_authors_words_and_the_prompt_beside_it(tmp_path: Path) -> None:
    turns = [("user", "First?"), ("assistant", "One."), ("user", "And then?"), ("assistant", "Two.")]
    rows = [
        {"question": "left out", "answer": ""},
        {"messages": [{"role": role, "content": content} for role, content in turns]},
        {"question": "How many?", "answer": "Two."},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    documents = [document([1, 2, 3, 0, 4, 5, 6, 0], [0, 0, 1, 1, 0, 0, 1, 1]), document([1, 2, 0], [0, 1, 1])]
    found = asked(documents, Letters(), length=20, pad=0, shown=2, words=LastQuestions(path, [1, 2]))
    assert [question.text for question in found.every] == ["And then?", "How many?"]
    assert [question.prompt for question in found.every] == ["abc.de", "a"]
