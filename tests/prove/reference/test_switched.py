"""A run whose method changes at each step is what its definition on one device says, whatever was owed before."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest

from phalanx import Layout
from phalanx.prove.cases import defined
from phalanx.prove.reference import switched
from phalanx.prove.reference.switched import TURNS, Switching, method_of
from tests.parity import TOLERANCE, HostileLanguage, Trace, difference, reference, spread_run
from tests.ranks import Ranks

ORDERS = (("int4", "bf16", "int4", "exact", "bf16"), ("int4", "int8", "int4", "int4", "exact"))
"""What 4 bits leave is sent by each of the others, and by themselves."""


def task() -> HostileLanguage:
    return HostileLanguage(steps=5)


def run(layout: str, order: Sequence[str]) -> Trace:
    return spread_run(task(), Layout.parse(layout), method_of=order.__getitem__)


@pytest.mark.parametrize(
    "layout", ["dp=2", "fsdp=2,micro_batch=5", "fsdp=3,zero=1", "dp=2,fsdp=2,zero=2", "fsdp=2,zero=2,micro_batch=5"]
)
@pytest.mark.parametrize("order", ORDERS)
def test_what_was_owed_is_sent_by_the_method_that_follows(ranks: Ranks, layout: str, order: tuple[str, ...]) -> None:
    layout = f"{layout},comm=auto"
    coded = defined(task(), Layout.parse(layout))
    assert isinstance(coded, Switching)
    with mock.patch.object(switched, "TURNS", order):
        right = reference(task(), coded=coded)
    for found in ranks(Layout.parse(layout).world, run, layout, order):
        error, where = difference(found, right)
        assert error < TOLERANCE, where


def test_a_proof_owes_something_half_way_and_tries_each_method() -> None:
    assert {method_of(step) for step in range(4)} == set(TURNS) == {"exact", "bf16", "int8", "int4"}
    assert method_of(1) == "int4"
