"""Columns are what the events say: after restarts, rollbacks, cut lines, and while they grow."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np

from phalanx.run import Run
from phalanx.watch.page.table import RunTable
from tests.watch.page.folders import append, start, step, write


def check(table: RunTable) -> None:
    """Against the run's own ledger, and each rank's own last words on each step."""
    run, ledger = table.run, table.run.ledger()
    assert table.steps == max(ledger, default=-1) + 1
    for name in ("loss", "grad_norm", "lr", "count"):
        known = [float(ledger[n][name]) if n in ledger else np.nan for n in range(table.steps)]
        np.testing.assert_allclose(table.shared[name].within(0, table.steps, 1)[0], known, rtol=1e-9)
    for rank in range(table.ranks):
        done: dict[int, dict] = {}
        for event in run.events(rank, "start", "step"):
            if event["kind"] == "start":
                done = {n: own for n, own in done.items() if n < event["step"]}
            else:
                done[event["step"]] = event
        for n in range(table.steps):
            for phase in table.phases:
                value = table.seconds[phase].within(n, n + 1, table.ranks)[rank, 0]
                expected = done[n]["seconds"].get(phase, np.nan) if n in done else np.nan
                np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-8)
            sent = table.sent["fsdp"].within(n, n + 1, table.ranks)[rank, 0]
            np.testing.assert_equal(sent, done[n]["sent"]["fsdp"] if n in done else np.nan)


def test_numbers_are_those_of_the_events(tmp_path: Path) -> None:
    table = RunTable(write(tmp_path / "run", 3, 60))
    assert table.refresh()
    assert (table.ranks, table.steps) == (3, 60)
    assert table.phases == ["data", "forward", "backward", "reduce", "update"]
    check(table)
    assert not table.refresh(), "nothing is new"


def test_it_reads_on_where_it_was_and_says_what_changed(tmp_path: Path) -> None:
    run = write(tmp_path / "run", 2, 30)
    table, draw = RunTable(run), random.Random(9)
    table.refresh()
    before = table.version
    for rank in (0, 1):
        append(run, rank, *(step(rank, n, draw) for n in range(30, 50)))
    whole = json.dumps(step(0, 50, draw)) + "\n"
    with run.events_path(0).open("a") as file:
        file.write(whole[:40])  # caught while it is written
    assert table.refresh()
    assert table.steps == 50
    assert table.changed(before) == 30
    assert table.changed(table.version) == table.steps
    with run.events_path(0).open("a") as file:
        file.write(whole[40:])
    assert table.refresh()
    assert table.steps == 51
    check(table)


def test_a_line_now_and_then_has_means_of_what_others_leave_out(tmp_path: Path) -> None:
    run = write(tmp_path / "run", 0, 0)
    for rank in (0, 1):
        append(run, rank, start(rank, 2))
        for n in range(200):
            line: dict = {"kind": "step", "time": 100.0 + n, "step": n}
            line |= {"seconds": {"forward": n / 8}} if rank else {"loss": n / 4, "samples": f"{n:016x}"}
            if n % 50 == 49:
                line |= {"exposed_dp": n / 100, "sent": {"dp": n}, "of": 50} | ({} if rank else {"lr": n / 1000})
            append(run, rank, line)
    table = RunTable(run)
    table.refresh()
    for rank in (0, 1):
        np.testing.assert_allclose(table.exposed["dp"].values[rank], np.repeat([0.49, 0.99, 1.49, 1.99], 50), rtol=1e-6)
        assert table.sent["dp"].values[rank].tolist() == np.repeat([49, 99, 149, 199], 50).tolist()
    assert table.seconds["forward"].values[1].tolist() == [n / 8 for n in range(200)]
    assert table.shared["loss"].values[0].tolist() == [n / 4 for n in range(200)]
    np.testing.assert_allclose(table.shared["lr"].values[0], np.repeat([0.049, 0.099, 0.149, 0.199], 50))
    assert "of" not in table.shared
    append(run, 1, start(1, 2, 120, 2), {"kind": "step", "time": 400.0, "step": 120, "exposed_dp": 7.0, "of": 1})
    table.refresh()
    assert table.exposed["dp"].values[1, 118:122].tolist()[2:3] == [7.0]
    assert np.isnan(table.exposed["dp"].values[1, 121:]).all(), "what a start undoes is undone"


def test_steps_that_were_done_again_count_once(tmp_path: Path) -> None:
    run = write(tmp_path / "run", 2, 40)
    table, draw = RunTable(run), random.Random(7)
    with run.events_path(1).open("a") as file:
        file.write('{"kind": "step", "ti\n')  # cut by a crash
    append(
        run,
        1,
        {"kind": "failure", "time": 1.7949e9 + 4.9, "reason": "was ended by SIGKILL", "step": 40, "generation": 1},
    )
    for rank in (0, 1):
        append(run, rank, start(rank, 2, 25, 2), *(step(rank, n, draw) for n in range(25, 60)))
    table.refresh()
    check(table)
    whole = table.shared["loss"].within(0, 60, 1)

    grown = RunTable(write(tmp_path / "other", 2, 40))  # the same, seen while it happened
    grown.refresh()
    before = grown.version
    draw = random.Random(7)
    for rank in (0, 1):
        append(grown.run, rank, start(rank, 2, 25, 2), *(step(rank, n, draw) for n in range(25, 60)))
    grown.refresh()
    assert grown.changed(before) == 25
    np.testing.assert_allclose(grown.shared["loss"].within(0, 60, 1), whole, rtol=1e-12)


def test_what_ranks_did_that_left_is_not_shown_where_others_did_it_again(tmp_path: Path) -> None:
    run = write(tmp_path / "run", 3, 40)
    draw = random.Random(1)
    for rank in (0, 1):  # the third rank's host was lost
        append(run, rank, start(rank, 2, 25, 2), *(step(rank, n, draw) for n in range(25, 60)))
    table = RunTable(run)
    table.refresh()
    assert np.isfinite(table.ended.values[2, :25]).all()
    assert np.isnan(table.ended.within(25, 60)[2]).all()


def test_rolled_back_and_left_out(tmp_path: Path) -> None:
    run, draw = write(tmp_path / "run", 1, 20), random.Random(2)
    append(run, 0, {"kind": "rollback", "time": 1.7949e9 + 3, "step": 15, "left_out": [15, 16]})
    append(
        run,
        0,
        *({"kind": "left out", "time": 1.7949e9 + 3, "step": n, "samples": "0", "skipped": True} for n in (15, 16)),
    )
    append(run, 0, *(step(0, n, draw) for n in range(17, 25)))
    table = RunTable(run)
    table.refresh()
    assert np.flatnonzero(np.isnan(table.shared["loss"].within(0, 25, 1)[0])).tolist() == [15, 16]
    assert table.steps == 25


def test_numbers_nobody_knows_by_name_and_those_that_are_none(tmp_path: Path) -> None:
    run, draw = write(tmp_path / "run", 1, 0), random.Random(3)
    own = [step(0, n, draw, logged={"top1": n / 10, "top5": n / 20}, turn="gen" if n % 2 else "dis") for n in range(40)]
    own[7] |= {"loss": "nan", "skipped": True, "bad": "the loss is nan"}
    append(run, 0, *own, {"kind": "evaluation", "time": 1.0, "step": 39, "held_out": {"accuracy": 0.5, "loss": "inf"}})
    table = RunTable(run)
    table.refresh()
    assert table.shared["logged/top5"].values[0, :40].tolist() == [n / 20 for n in range(40)]
    dis, gen = table.shared["loss of dis"].values[0], table.shared["loss of gen"].values[0]
    assert np.isnan(dis[1::2]).all()
    assert np.isnan(gen[::2]).all()
    assert np.isnan(gen[7])
    assert gen[5] == own[5]["loss"]
    assert table.shared["held out/accuracy"].values[0, 39] == 0.5


def test_files_that_are_replaced_or_gone(tmp_path: Path) -> None:
    run = write(tmp_path / "run", 2, 30)
    table = RunTable(run)
    table.refresh()
    path = run.events_path(0)
    path.unlink()
    assert not table.refresh()
    draw = random.Random(5)
    append(run, 0, start(0, 2), *(step(0, n, draw) for n in range(10)))
    assert table.refresh()
    assert table.steps == 10
    (run.path / "events" / "rank-notes.jsonl").write_text("{}\n")
    assert not table.refresh()
    assert not RunTable(Run(tmp_path / "nothing")).refresh()
