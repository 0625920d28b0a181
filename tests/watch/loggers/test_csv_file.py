"""The CSV file: each step once, whatever happened to the run."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from phalanx.run import Run
from phalanx.watch.loggers.csv_file import StepTable
from tests.watch.loggers.runs import STEPS, losses


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_that_went_back_has_each_step_once(run: Run) -> None:
    found = rows(run.path / "logs" / "metrics.csv")
    assert [int(row["step"]) for row in found] == list(range(1, STEPS + 1))
    assert [float(row["loss"]) for row in found] == pytest.approx(losses(run), rel=1e-9)
    for row in found:
        assert float(row["loss"]) == pytest.approx(float(row["loss/right"]) + float(row["loss/small"]), rel=1e-5)
        assert 0 <= float(row["accuracy"]) <= 1
        assert float(row["samples_per_second"]) > 0
        assert float(row["seconds/forward"]) > 0
        assert row["some/first x"]
    evaluated = rows(run.path / "logs" / "evaluations.csv")
    assert [int(row["step"]) for row in evaluated] == [5, 10, STEPS]
    assert all(float(row["loss"]) > 0 and "accuracy" in row for row in evaluated)
    noted = {event["step"] + 1: event["held_out"]["loss"] for event in run.events(0, "evaluation")}
    assert [float(row["loss"]) for row in evaluated] == pytest.approx([noted[5], noted[10], noted[STEPS]])


def test_columns_may_come_later_and_steps_may_come_again(tmp_path: Path) -> None:
    table = StepTable(path := tmp_path / "a.csv", 0)
    table.add(1, {"loss": 1.0})
    table.add(2, {"loss": float("nan"), 'a,"b': 2.0})
    table.add(3, {'a,"b': 0.1})
    table.close()
    with path.open("a") as file:
        file.write("4,0.5")  # cut short
    assert rows(path)[:3] == [
        {"step": "1", "loss": "1", 'a,"b': ""},
        {"step": "2", "loss": "nan", 'a,"b': "2"},
        {"step": "3", "loss": "", 'a,"b': "0.1"},
    ]
    again = StepTable(path, 2)
    again.add(3, {"loss": 7.0})
    again.add(3, {"loss": 8.0})
    again.close()
    assert [(row["step"], row["loss"]) for row in rows(path)] == [("1", "1"), ("2", "nan"), ("3", "8")]
