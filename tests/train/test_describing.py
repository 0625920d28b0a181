"""A dry run in words: what would run, by arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import phalanx
from phalanx import Layout, WrongUse
from phalanx.cluster import Cluster
from phalanx.train.describing import describe
from phalanx.train.job import Job
from phalanx.train.options import Options
from tests.tasks import Digits


def described(layout: Layout, task: phalanx.Task | None = None) -> dict[str, str]:
    job = Job("digits.py", task or Digits(), layout, Cluster.here(layout.world, "cpu"), Options())
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in describe(job).splitlines() if line.strip()}


def test_what_would_run() -> None:
    told = described(Layout(dp=2, micro_batch=2))
    assert told["task"] == "digits.py (Digits)"
    assert "global_batch=8" in told["set"]
    assert told["layout"].startswith("dp=2,micro_batch=2 on ")
    assert told["micro"] == "2 micro-batches a step"
    assert told["dtypes"].startswith("parameter float32")
    assert "zero=2 has no effect" in described(Layout(zero=2))["note"]


@dataclass
class Called(Digits):
    def callbacks(self) -> list[phalanx.Callback]:
        return [phalanx.Freeze("0.*", until=2), phalanx.EMA()]


def test_callbacks_are_named() -> None:
    assert "calls" not in described(Layout())
    assert described(Layout(), Called())["calls"] == "Freeze, EMA"


def test_a_layout_that_the_model_cannot_have_is_refused() -> None:
    with pytest.raises(WrongUse):
        described(Layout(pp=8))


def test_sites_sum_no_gradients_and_have_no_scales_of_their_own() -> None:
    assert described(Layout(dp=2))[".*.bias"].endswith(" dp")
    assert described(Layout(dp=2, comm="diloco:4"))[".*.bias"].endswith(" none")
    for precision in ("fp16", "fp8"):
        with pytest.raises(WrongUse, match=r"keeps scales .* Use precision=bf16"):
            described(Layout(dp=2, comm="local:4"), Digits(precision=precision))


class Spoken(Digits):
    def overview(self) -> tuple[dict[str, str], list[str]]:
        return {"rows": "7: 2 held out"}, ["left out: one"]


def test_a_task_says_lines_of_its_own() -> None:
    told = described(Layout(), Spoken())
    assert (told["rows"], told["note"]) == ("7: 2 held out", "left out: one")
