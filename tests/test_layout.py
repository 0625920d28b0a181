"""Layouts: one text form, and refusals that name the numbers and what would work."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx import Layout, WrongUse
from phalanx.layout import CHOICES

degrees = st.integers(1, 64)


@given(
    st.builds(
        Layout,
        dp=degrees,
        fsdp=degrees,
        tp=degrees,
        cp=degrees,
        pp=degrees,
        ep=degrees,
        zero=st.sampled_from([1, 2, 3]),
        micro_batch=st.none() | degrees,
        **{name: st.sampled_from(known) for name, known in CHOICES.items()},
    )
)
def test_the_text_form_reads_back(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


def test_the_text_form_is_short() -> None:
    assert str(Layout()) == "dp=1"
    assert str(Layout(fsdp=4, tp=2, pp=2)) == "fsdp=4,tp=2,pp=2"
    assert Layout.parse(" fsdp = 4 , zero=2 ") == Layout(fsdp=4, zero=2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fspd=2", "did you mean 'fsdp'"),
        ("dp", "is not name=value"),
        ("dp=two", "whole number"),
        ("dp=0", "whole number from 1"),
        ("dp=2,dp=4", "twice"),
        ("", "empty"),
        ("zero=4", "ZeRO stage"),
        ("recompute=ful", "did you mean 'full'"),
        ("micro_batch=-1", "whole number from 1"),
    ],
)
def test_bad_text_is_refused(text: str, expected: str) -> None:
    with pytest.raises(WrongUse, match=re.escape(expected)):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("layout", "batch", "world", "numbers", "nearest"),
    [
        ("dp=3", 32, 4, "dp=3 needs 3 ranks and there are 4", "dp=4"),
        ("dp=2,fsdp=2", 32, 8, "dp=2 x fsdp=2 needs 4 ranks and there are 8", "dp=2,fsdp=4|dp=4,fsdp=2"),
        ("fsdp=8", 4, 8, "global_batch=4 is less than the 8 ranks of dp=1 x fsdp=8", "fsdp=4 on 4 ranks"),
        ("dp=2,micro_batch=40", 32, 2, "micro_batch=40 is more than a rank's share of 16", "dp=2,micro_batch=16"),
        ("fsdp=2,ep=4", 32, 2, "ep=4 does not divide fsdp=2 x cp=1", "fsdp=2"),
        (
            "tp=2,compile=blocks",
            32,
            2,
            "compile=blocks is not offered with tp=2",
            "tp=2",
        ),
        ("dp=2,tp=2", 32, 8, "needs 4 ranks and there are 8", "dp=4,tp=2|dp=2,fsdp=2,tp=2"),
        ("dp=4,tp=2", 2, 8, "is less than the 4 ranks", "dp=2,tp=2 on 4 ranks|fsdp=2,tp=2 on 4 ranks"),
    ],
)
def test_what_cannot_work_names_the_numbers_and_the_nearest(
    layout: str, batch: int, world: int, numbers: str, nearest: str
) -> None:
    with pytest.raises(WrongUse) as refusal:
        Layout.parse(layout).check(batch, world)
    text = str(refusal.value)
    assert numbers in text
    suggested = text.partition("works: ")[2]
    assert suggested in nearest.split("|")
    proposal, _, ranks = suggested.partition(" on ")
    Layout.parse(proposal).check(batch, int(ranks.split()[0]) if ranks else world)  # and it does work


def test_micro_batches_are_the_same_number_on_every_rank() -> None:
    assert Layout(dp=4).micro_batches(31) == 1
    assert Layout(dp=4, micro_batch=2).micro_batches(31) == 4
    assert Layout(dp=8, micro_batch=1).micro_batches(31) == 4


def test_settings_without_effect_are_said() -> None:
    assert "no effect" in Layout(dp=2, zero=1).notes("cpu")[0]
    assert "offload" in Layout(offload="optimizer").notes("cpu")[0]
    assert not Layout(fsdp=2, zero=1).notes("cuda")
