"""What the page is given: true numbers, no spike lost, and only what is new to whoever has the rest."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path

import numpy as np

from phalanx.watch.page import views
from phalanx.watch.page.table import RunTable
from tests.watch.page.folders import append, start, step, write


def opened(folder: Path, ranks: int, steps: int, slow: tuple[int, int] | None = None) -> RunTable:
    table = RunTable(write(folder, ranks, steps, slow))
    table.refresh()
    return table


def test_charts_have_the_least_and_the_most(tmp_path: Path) -> None:
    table = opened(tmp_path / "run", 2, 200)
    ledger = table.run.ledger()
    found = json.loads(json.dumps(views.charts(table, views.Window.of(table, {"columns": 20}))))
    assert (found["width"], found["steps"]) == (10, list(range(0, 200, 10)))
    losses = [[ledger[n]["loss"] for n in range(at, at + 10)] for at in found["steps"]]
    np.testing.assert_allclose(found["series"]["loss"]["low"], [min(own) for own in losses], rtol=1e-5)
    np.testing.assert_allclose(found["series"]["loss"]["high"], [max(own) for own in losses], rtol=1e-5)
    assert "high" not in found["series"]["sent/fsdp"], "always the same"
    assert set(found["series"]["sent/fsdp"]["low"]) == {1048580.0}
    fine = views.charts(table, views.Window.of(table, {"columns": 400, "first": 50, "last": 60}))
    assert fine["steps"] == list(range(50, 60))
    np.testing.assert_allclose(fine["series"]["loss"]["low"], [ledger[n]["loss"] for n in range(50, 60)], rtol=1e-5)


def test_seconds_and_rates(tmp_path: Path) -> None:
    table = opened(tmp_path / "run", 3, 40, slow=(2, 30))
    series = views.charts(table, views.Window.of(table, {}))["series"]
    longest = max(range(40), key=series["seconds a step"]["low"].__getitem__)
    assert longest == 30
    events = list(table.run.events(2, "step"))
    np.testing.assert_allclose(series["seconds a step"]["low"][30], sum(events[30]["seconds"].values()), rtol=1e-4)
    times = [event["time"] for event in table.run.events(0, "step")]
    np.testing.assert_allclose(series["samples a second"]["low"][1:], 16 / np.diff(times), rtol=1e-3)
    assert series["samples a second"]["low"][0] is None


def test_whoever_has_the_rest_is_told_what_is_new(tmp_path: Path) -> None:
    table, draw = opened(tmp_path / "run", 2, 100), random.Random(4)
    known = views.charts(table, views.Window.of(table, {"columns": 50}))
    append(table.run, 0, *(step(0, n, draw) for n in range(100, 105)))
    table.refresh()
    wide = views.charts(table, views.Window.of(table, {"columns": 60}), known["version"], known["width"])
    assert (wide["width"], wide["begin"], wide["steps"]) == (2, 100, [100, 102, 104])
    other = views.charts(table, views.Window.of(table, {"columns": 50}), known["version"], known["width"])
    assert (other["width"], other["begin"]) == (5, 0), "buckets are wider now: all of them"
    none = views.charts(table, views.Window.of(table, {"columns": 60}), table.version, 2)
    assert none["steps"] in ([], [104])
    append(table.run, 0, start(0, 2, 90, 2), *(step(0, n, draw) for n in range(90, 106)))
    table.refresh()
    again = views.charts(table, views.Window.of(table, {"columns": 60}), wide["version"], 2)
    assert again["begin"] == 90, "steps that were done again are new"


def test_the_map_shows_the_one_slow_step(tmp_path: Path) -> None:
    table = opened(tmp_path / "run", 5, 300, slow=(3, 217))
    found = views.heat(table, views.Window.of(table, {"columns": 30}))
    cells = np.frombuffer(base64.b64decode(found["cells"]), "<u2").reshape(found["rows"], found["columns"])
    assert cells.shape == (5, 30)
    assert np.argwhere(cells == 65535).tolist() == [[3, 21]]
    slowest = max(found["ranks"], key=lambda own: own["most"])
    assert (slowest["rank"], slowest["step"]) == (3, 218)
    one = views.heat(table, views.Window.of(table, {"columns": 30}), "forward")
    expected = max(event["seconds"]["forward"] for event in table.run.events(3, "step"))
    np.testing.assert_allclose(one["most"], expected, rtol=1e-5)
    assert not views.heat(table, views.Window.of(table, {}), "no such phase")["ranks"]


def test_a_slow_rank_is_seen_where_others_wait_for_it(tmp_path: Path) -> None:
    """All take as long as the slowest: only what they wait for is different."""
    run = write(tmp_path / "run", 0, 0)
    for rank in range(4):
        own = 0.09 if rank == 2 else 0.03
        seconds = {"data": 0.01, "forward": 0.1 - 0.01}
        exposed = {"exposed_dp": round(0.09 - own, 6), "exposed_tp": 0.0, "overlapped_dp": 0.001}
        lines = [{"kind": "step", "time": 1.0 + n, "step": n, "seconds": seconds, **exposed} for n in range(40)]
        append(run, rank, start(rank, 4), *lines)
    table = RunTable(run)
    table.refresh()
    found = views.heat(table, views.Window.of(table, {}))
    assert (found["phase"], found["phases"][:2]) == ("own", ["own", "total"])
    assert [round(each["usual"], 4) for each in found["ranks"]] == [0.04, 0.04, 0.1, 0.04]
    whole = views.heat(table, views.Window.of(table, {}), "total")
    assert {round(each["usual"], 4) for each in whole["ranks"]} == {0.1}
    series = views.charts(table, views.Window.of(table, {}))["series"]
    np.testing.assert_allclose(series["exposed/dp"]["low"], 0.045)
    assert not [name for name in series if "overlapped" in name], "a rank's own is no chart"


def test_without_a_word_on_waiting_phases_that_wait_are_left_out(tmp_path: Path) -> None:
    run = write(tmp_path / "run", 0, 0)
    lines = [
        {"kind": "step", "time": 1.0 + n, "step": n, "seconds": {"forward": 0.5, "reduce": 0.25}} for n in range(3)
    ]
    append(run, 0, start(0, 1), *lines)
    table = RunTable(run)
    table.refresh()
    assert views.phase_seconds(table, "own", 0, 3).tolist() == [[0.5, 0.5, 0.5]]
    assert views.phase_seconds(table, "total", 0, 3).tolist() == [[0.75, 0.75, 0.75]]


def test_many_ranks_share_rows(tmp_path: Path) -> None:
    table = opened(tmp_path / "run", 300, 3)
    found = views.heat(table, views.Window.of(table, {}))
    assert (found["rows"], found["ranks_a_row"]) == (150, 2)
    spans = views.spans(table, views.Window.of(table, {}))
    assert len(spans["rows"]) == views.MOST_LANES
    assert spans["of_ranks"] == 300


def test_spans_are_where_the_events_put_them(tmp_path: Path) -> None:
    table = opened(tmp_path / "run", 2, 100)
    append(table.run, 0, {"kind": "checkpoint", "time": 1.7949e9 + 11.5, "step": 95, "seconds": 0.2})
    table.refresh()
    found = views.spans(table, views.Window.of(table, {"first": 90, "last": 95}))
    assert (found["first"], found["last"], len(found["rows"])) == (90, 95, 2)
    events = {event["step"]: event for event in table.run.events(1, "step")}
    begun = [event["time"] - sum(event["seconds"].values()) for event in events.values()]
    first = min(list(table.run.events(0, "step"))[90]["time"], *begun[90:95])
    number, offset, *took = found["rows"][1]["steps"][2]
    assert number == 92
    np.testing.assert_allclose(took, list(events[92]["seconds"].values()), atol=2e-6)
    assert abs(begun[92] - first - offset) < 0.15
    assert [saved["step"] for saved in found["checkpoints"]] == [95]
    assert views.spans(table, views.Window.of(table, {}))["first"] == 100 - views.MOST_STEPS, "the last of many"


def test_a_run_without_a_step(tmp_path: Path) -> None:
    table = opened(tmp_path / "run", 1, 0)
    window = views.Window.of(table, {})
    assert views.charts(table, window)["series"] == {}
    assert views.heat(table, window)["most"] == 0
    assert views.spans(table, window)["rows"] == []
