"""Schedules by name: their values, and what is refused."""

from __future__ import annotations

import math

import pytest

from phalanx import Task, WrongUse
from phalanx.schedules import KINDS, schedule

STEPS, WARMUP = 20, 4
VALUES = {
    "cosine": {4: 1.0, 12: 0.55, 20: 0.1, 99: 0.1},
    "cosine:end=0": {4: 1.0, 12: 0.5, 16: 0.5 * (1 - math.sqrt(0.5)), 20: 0.0},
    "linear": {4: 1.0, 8: 0.75, 12: 0.5, 20: 0.0, 99: 0.0},
    "linear:end=0.5": {4: 1.0, 12: 0.75, 20: 0.5},
    "constant": {4: 1.0, 20: 1.0, 99: 1.0},
    "wsd": {4: 1.0, 16: 1.0, 18: 0.55, 20: 0.1, 99: 0.1},
    "wsd:decay=0.4,end=0": {4: 1.0, 12: 1.0, 14: 0.75, 16: 0.5, 19: 0.125, 20: 0.0},
    "wsd:decay=0.4,shape=sqrt,end=0": {12: 1.0, 14: 0.5, 16: 1 - math.sqrt(0.5), 20: 0.0},
    "wsd:decay=1,shape=linear,end=0.2": {4: 1.0, 12: 0.6, 20: 0.2, 99: 0.2},
    "inverse_sqrt": {3: 1.0, 4: math.sqrt(4 / 5), 15: 0.5, 399: 0.1},
    "polynomial": {4: 1.0, 12: 0.25, 16: 0.0625, 20: 0.0},
    "polynomial:power=1,end=0.2": {12: 0.6, 20: 0.2},
    "restarts:cycles=2": {4: 1.0, 8: 0.5, 12: 1.0, 16: 0.5, 20: 0.0, 99: 0.0},
    "restarts:cycles=1,end=0.1": {12: 0.55, 20: 0.1},
    "plateau": {4: 1.0, 12: 1.0, 99: 1.0},
}


@pytest.mark.parametrize("text", VALUES)
def test_values(text: str) -> None:
    factor = schedule(text, STEPS, WARMUP)
    assert [factor(step) for step in range(WARMUP)] == [0.25, 0.5, 0.75, 1.0]
    assert {step: factor(step) for step in VALUES[text]} == pytest.approx(VALUES[text])


def test_every_kind_has_values_here() -> None:
    assert {text.partition(":")[0] for text in VALUES} == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_a_factor_wherever_it_is_asked(kind: str) -> None:
    for steps, warmup in ((0, 0), (1, 0), (1, 5), (3, 3), (50, 7)):
        factor = schedule(kind, steps, warmup)
        assert all(0 <= factor(step) <= 1 for step in (*range(60), 10**6))
        assert factor(warmup) == pytest.approx(1.0, abs=0.3) or warmup >= steps


def test_one_that_begins_later_is_the_same_of_fewer_steps() -> None:
    later, short = schedule("wsd:decay=0.3", 20, 4, first=5), schedule("wsd:decay=0.3", 15, 4)
    assert [later(step) for step in range(20)] == [0.0] * 5 + [short(step) for step in range(15)]


def test_a_task_has_the_one_that_it_names() -> None:
    assert Task(rate="linear", steps=20, warmup_steps=4).schedule()(12) == 0.5  # type: ignore[operator]
    assert Task(steps=20, warmup_steps=4).schedule()(12) == pytest.approx(0.55)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cosin", "did you mean 'cosine'"),
        ("linear:decay=0.1", "'decay=0.1' is no option of linear. It takes end=0.0."),
        ("constant:end=0", "It takes no options"),
        ("wsd:decay", "'decay' is no option of wsd"),
        ("wsd:decay=0", "decay=0 is not a share of all steps"),
        ("wsd:shape=round", "shape=round is not known. Choose one of: linear, sqrt"),
        ("cosine:end=nan", "end=nan is not a share of the learning rate"),
        ("polynomial:power=-1", "power=-1 is not a number above 0"),
        ("restarts:cycles=1.5", "cycles=1.5 is not a whole number"),
        (0.1, "rate=0.1 is no schedule"),
    ],
)
def test_what_is_none_is_refused(text: str, words: str) -> None:
    with pytest.raises(WrongUse, match=words.replace("(", r"\(")):
        Task(rate=text).check()
