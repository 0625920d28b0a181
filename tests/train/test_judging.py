"""A judge of the user's, found and asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx import WrongUse
from phalanx.questions import ModelAnswer
from phalanx.train.judging import judge_of, judged

ANSWERS = [ModelAnswer("a", "b", "b"), ModelAnswer("a", "b", "c")]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "judges.py"
    path.write_text(
        "def same(question, answer, reference):\n    return answer == reference\n\ndef bad(*_):\n    return 'x'"
    )
    return path


def test_the_mean_of_what_it_says(file: Path) -> None:
    assert judged(judge_of(f"{file}:same"), ANSWERS) == 0.5


@pytest.mark.parametrize(("name", "words"), [
    ("judges", "names no function of a file. Write it like --judge"),
    ("nowhere.py:score", "is not there"),
])  # fmt: skip
def test_what_is_no_judge_is_refused(name: str, words: str) -> None:
    with pytest.raises(WrongUse, match=words):
        judge_of(name)


def test_a_function_that_is_not_there_or_gives_no_number(file: Path) -> None:
    with pytest.raises(WrongUse, match="has no function some; did you mean 'same'"):
        judge_of(f"{file}:some")
    with pytest.raises(WrongUse, match="bad gave 'x' for an answer, which is no number"):
        judged(judge_of(f"{file}:bad"), ANSWERS)


def test_one_that_takes_something_else_is_refused_before_anything_is_answered(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text("def score(question, answer):\n    return 1.0\n")
    with pytest.raises(WrongUse, match=r"score of .* cannot be called with three texts"):
        judge_of(f"{tmp_path}/short.py:score")
