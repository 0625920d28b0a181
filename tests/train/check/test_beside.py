"""The check beside a rank: in another process, which leaves nothing behind, and of which only the result is known."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import phalanx
from phalanx import Engine, streams
from phalanx.events import say
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


@dataclass
class Troubled(Digits):
    """What goes wrong in data() of the check's process, and not in the rank's own."""

    trouble: str = ""
    owner: int = 0
    note: str = ""

    def data(self) -> Any:
        if os.getpid() != self.owner:
            if self.note:
                say(self.note, streams.stderr())
                print("printed by the user's code", flush=True)
            if self.trouble == "child":
                started = subprocess.Popen(["sleep", "1000"])
                Path(self.note).write_text(str(started.pid))
            if self.trouble in ("killed", "child"):
                os.kill(os.getpid(), signal.SIGKILL)
            if self.trouble == "exit":
                raise SystemExit(5)
            if self.trouble == "hangs":
                time.sleep(1000)
        return super().data()


def troubled(trouble: str, patience: float = 60.0, note: str = "") -> tuple[str, int, list[Any], list[str]]:
    """In a rank: what is said, how many steps it trains, how many processes it has then."""
    before, beside.PATIENCE_SECONDS = beside.PATIENCE_SECONDS, patience
    try:
        found = settled(Troubled(trouble=trouble, owner=os.getpid(), note=note), False)
    finally:
        beside.PATIENCE_SECONDS = before
    return found[0], len(multiprocessing.active_children()), found[1], found[2]


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("killed", "its process was killed by SIGKILL"),
        ("exit", "its process ended with exit code 5"),
        ("hangs", "it took more than 0.5 s"),
    ],
)
def test_a_run_goes_on_without_its_check(fresh: Ranks, trouble: str, words: str) -> None:
    refusal, left, noted, said = fresh(1, troubled, trouble, 0.5 if trouble == "hangs" else 60.0)[0]
    assert (refusal, left) == ("", 0)
    assert noted == [("check", {"warnings": [], "left_out": words})]
    assert said == [f"   note  the task was not checked: {words}"]


def test_what_the_users_code_has_started_in_it_ends_with_it(fresh: Ranks, tmp_path: Path) -> None:
    fresh(1, troubled, "child", 60.0, str(tmp_path / "pid"))
    pid = int((tmp_path / "pid").read_text())
    ends = time.monotonic() + 10
    while (status := Path(f"/proc/{pid}/stat")).exists() and status.read_text().split()[2] != "Z":
        assert time.monotonic() < ends, "it outlives the check"
        time.sleep(0.05)


def told_elsewhere(path: str) -> None:
    kept = [os.dup(number) for number in (1, 2)]
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    try:
        troubled("", note="   note  a file is written anew")
    finally:
        for number, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, number)


def test_what_phalanx_says_in_it_is_shown_and_what_the_users_code_prints_is_not(fresh: Ranks, tmp_path: Path) -> None:
    fresh(1, told_elsewhere, str(tmp_path / "told"))
    told = (tmp_path / "told").read_text()
    assert told.count("   note  a file is written anew\n") == 1
    assert "printed by" not in told


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


def test_generators_are_as_they_were_and_errors_are_the_tasks_own() -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = drawn()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    phalanx.check(Digits())
    assert drawn() == expected
    with pytest.raises(KeyError, match="RANK"):
        phalanx.check(Digits(mistake="rank 1 fails"))
