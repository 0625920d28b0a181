"""A rank's memory by part: what is written when it changes is carried on, also over restarts."""

from __future__ import annotations

import random
from pathlib import Path

from phalanx.watch.page.memory import memory, ranks
from phalanx.watch.page.table import RunTable
from phalanx.watch.page.views import Window
from tests.watch.page.folders import append, start, step, write


def told(table: RunTable, rank: int, **asked: int) -> dict:
    return memory(table, rank, Window.of(table, asked))


def test_what_was_last_told_goes_on(tmp_path: Path) -> None:
    run, draw = write(tmp_path / "run", 0, 0), random.Random(0)
    for rank in (0, 1):
        append(run, rank, start(rank, 2))
        for n in range(60):
            parts = {"memory_weights": 100 + rank, "memory_activations": 7} if n == 2 else {}
            parts |= {"memory_activations": 50 + n} if n % 20 == 19 else {}
            append(run, rank, {**step(rank, n, draw), **parts})
    table = RunTable(run)
    table.refresh()
    assert ranks(table) == [0, 1]
    found = told(table, 1)
    assert list(found["parts"]) == ["weights", "activations"], "as they are stacked"
    assert found["parts"]["weights"] == [None, None, *58 * [101]]
    assert found["parts"]["activations"] == [None, None, *17 * [7], *20 * [69], *20 * [89], 109]
    assert "memory_weights" not in table.shared, "it is a rank's own"
    assert told(table, 0, first=30, last=40)["parts"]["activations"] == [*9 * [69], 89], "also where a part is shown"
    assert told(table, 0, columns=10)["parts"]["weights"] == 6 * [100]
    assert told(table, 9)["rank"] == 0, "a rank that is not there"


def test_steps_that_are_done_again_take_their_memory_with_them(tmp_path: Path) -> None:
    run, draw = write(tmp_path / "run", 0, 0), random.Random(0)
    sizes = {3: {"memory_weights": 5, "memory_peak": 9}, 15: {"memory_weights": 8}}
    append(run, 0, start(0, 1), *(step(0, n, draw, **sizes.get(n, {})) for n in range(20)))
    table = RunTable(run)
    table.refresh()
    assert told(table, 0)["parts"]["weights"][-1] == 8
    append(run, 0, start(0, 1, 10, 2), *(step(0, n, draw) for n in range(10, 30)))
    table.refresh()
    found = told(table, 0)
    assert found["parts"] == {"weights": [*3 * [None], *27 * [5]]}
    assert found["wholes"]["peak"][-1] == 9


def test_a_run_that_tells_nothing_of_it(tmp_path: Path) -> None:
    table = RunTable(write(tmp_path / "run", 1, 5))
    table.refresh()
    assert (told(table, 0)["parts"], told(table, 0)["ranks"]) == ({}, [])
