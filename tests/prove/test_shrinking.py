"""A layout that fails is made small, for as long as it fails in the same way."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.layout import Layout
from phalanx.prove.ladder import Difference
from phalanx.prove.ranks.outcome import TrialOutcome
from phalanx.prove.ranks.witness import Testimony
from phalanx.prove.shrinking import Shrinking, smaller


def differing(rung: str) -> TrialOutcome:
    seen = [Difference(0, rung, "a", math.inf, 0)] if rung else []
    return TrialOutcome([Testimony(0, {"dp": 0, "fsdp": 0}, seen)])


def shrinking(rung: Callable[[Layout], str]) -> Shrinking:
    """Of ranks that fail where ``rung`` says so."""
    case = SimpleNamespace(micro_batches=1, as_run=lambda layout: layout)
    ranks = SimpleNamespace(attest=lambda number, layout: differing(rung(layout)))
    docket: Any = SimpleNamespace(cases=[case])
    return Shrinking(docket, ranks)  # type: ignore[arg-type]


def test_smaller_layouts_have_one_part_less() -> None:
    found = [str(layout) for layout in smaller(Layout.parse("dp=2,fsdp=4,zero=1"))]
    assert found == ["dp=2,zero=1", "fsdp=4,zero=1", "dp=2,fsdp=2,zero=1", "dp=2,fsdp=4"]


def test_experts_go_with_the_ranks_that_hold_them() -> None:
    assert all((layout.fsdp * layout.cp) % layout.ep == 0 for layout in smaller(Layout.parse("fsdp=2,cp=2,ep=4")))


@pytest.mark.parametrize(
    ("layout", "fails", "minimal"),
    [
        ("dp=2,fsdp=2,tp=4", lambda layout: layout.tp > 1, "tp=2"),
        ("dp=2,fsdp=2,tp=4", lambda layout: layout.tp == 4 and layout.dp > 1, "dp=2,tp=4"),
        ("fsdp=4,zero=1", lambda layout: layout.zero == 1 and layout.fsdp > 1, "fsdp=2,zero=1"),
    ],
)
def test_what_it_takes_stays(layout: str, fails: Callable[[Layout], bool], minimal: str) -> None:
    tries = shrinking(lambda layout: "gradients" if fails(layout) else "")
    found, outcome = tries.minimal(Layout.parse(layout), 0, differing("gradients"))
    assert str(found) == minimal
    assert outcome.fails


def test_another_failure_is_not_followed() -> None:
    tries = shrinking(lambda layout: "loss" if layout.dp == 1 else "gradients")
    found, _ = tries.minimal(Layout.parse("dp=2,tp=2"), 0, differing("gradients"))
    assert str(found) == "dp=2"


def test_axes_are_what_is_left_and_micro_batches_if_they_matter() -> None:
    tries = shrinking(lambda layout: "gradients" if layout.micro_batch else "")
    assert tries.axes(Layout.parse("fsdp=2,zero=1,micro_batch=2"), 0) == ["fsdp", "zero=1", "micro-batches"]
    assert shrinking(lambda layout: "loss").axes(Layout.parse("fsdp=2,ep=2"), 0) == ["ep"]
