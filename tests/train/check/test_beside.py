"""The check beside a rank: in another process, which leaves nothing behind, and of which only the result is known."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import phalanx
from phalanx import Engine
from phalanx.train.check import beside
from phalanx.train.check.beside import Check, Checked, settle
from tests.mistakes import AnotherModel, MatricesAlone, MeanAndOne
from tests.ranks import Ranks
from tests.tasks import Digits


@pytest.fixture(scope="module")
def fresh() -> Iterator[Ranks]:
    """Ranks that have not computed yet, as those that are about to train."""
    pool = Ranks(2)
    yield pool
    pool.close()


@dataclass
class Counted(Digits):
    """Notes in which processes its loss was computed; ``ends`` in one where it is asked to."""

    asked: list[int] = field(default_factory=list)
    ends: bool = False
    waits: float = 0.0

    def loss(self, output: Tensor, batch: dict[str, Any]) -> Any:
        self.asked.append(os.getpid())
        if self.ends:
            os._exit(7)
        time.sleep(self.waits)
        return super().loss(output, batch)


def begun(task: Digits) -> tuple[Checked, int]:
    """In a rank: what the check found, and how often the rank's own task was asked for a loss."""
    with Check(task) as check:
        found = check.result()
    return found, len(getattr(task, "asked", []))


def test_the_rank_itself_computes_nothing(fresh: Ranks) -> None:
    assert fresh(1, begun, Counted())[0] == (Checked(), 0)


def test_a_process_that_ends_is_said(fresh: Ranks) -> None:
    found, _ = fresh(1, begun, Counted(ends=True))[0]
    assert found.left_out == "its process ended with exit code 7"
    assert not found.refusal


def hurried(task: Digits) -> str:
    before, beside.PATIENCE_SECONDS = beside.PATIENCE_SECONDS, 0.2
    try:
        return begun(task)[0].left_out
    finally:
        beside.PATIENCE_SECONDS = before


def test_it_is_not_waited_for_for_ever(fresh: Ranks) -> None:
    assert fresh(1, hurried, Counted(waits=30.0))[0] == "it took more than 0.2 s"


def settled(task: phalanx.Task, unchecked: bool) -> tuple[str, list[Any], list[str]]:
    noted: list[Any] = []
    said: list[str] = []
    try:
        with ExitStack() as undo:
            first = int(os.environ.get("RANK", 0)) == 0
            check = undo.enter_context(Check(task, unchecked=unchecked)) if first else None
            engine = undo.enter_context(Engine(task))
            settle(engine, check, lambda kind, **facts: noted.append((kind, facts)), said.append)
    except phalanx.WrongUse as refusal:
        return str(refusal), noted, said
    return "", noted, said


@pytest.mark.parametrize("world", [1, 2])
def test_every_rank_refuses(fresh: Ranks, world: int) -> None:
    for refusal, noted, said in fresh(world, settled, MeanAndOne(), False):
        assert "is a mean and a count of 1 (tests/mistakes.py:" in refusal
        assert refusal.endswith("If it is meant so: --unchecked.")
        assert not noted
        assert not said


def test_what_is_likely_is_said_by_one_rank(fresh: Ranks) -> None:
    first, second = fresh(2, settled, MatricesAlone(), False)
    assert first[0] == second[0] == ""
    assert first[2][0].startswith("warning  ")
    assert "0.bias, 2.bias are trainable and in no group" in first[2][0]
    assert first[1][0][1]["left_out"] == ""
    assert second[1:] == ([], [])


def test_unchecked_is_noted(fresh: Ranks) -> None:
    refusal, noted, said = fresh(1, settled, MeanAndOne(), True)[0]
    assert refusal == ""
    assert noted == [("check", {"warnings": [], "left_out": "--unchecked"})]
    assert said == ["   note  the task was not checked: --unchecked"]


def test_the_checks_words_go_before_the_engines(fresh: Ranks) -> None:
    assert "tests/mistakes.py:" in fresh(1, settled, AnotherModel(), False)[0][0]


def after_a_backward(task: Digits) -> Checked:
    torch.ones(1, requires_grad=True).sum().backward()
    return begun(task)[0]


def test_where_autograd_has_run_it_is_left_out(fresh: Ranks) -> None:
    found = fresh(2, after_a_backward, Digits())[0]  # the last test: these ranks have computed now
    assert found == Checked(left_out="this process has computed before it")
