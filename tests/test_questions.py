"""Answers and what they are held against."""

from __future__ import annotations

from phalanx.questions import ModelAnswer


def test_an_answer_is_exact_but_for_spaces() -> None:
    assert ModelAnswer("How many?", " two  kidneys\n", "two kidneys").exact
    assert not ModelAnswer("How many?", "Two kidneys", "two kidneys").exact
