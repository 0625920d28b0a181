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
        exact=st.sampled_from([0, 1, 2, 8, 64]),
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
        ("offload_percent=0", "whole number from 1"),
        ("offload_percent=101", "more than all"),
        ("offload_percent=50", "Add offload=optimizer or offload=params"),
        ("exact=12", "no power of two"),
        ("exact=-8", "no power of two"),
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
        ("fsdp=2,ep=4", 32, 2, "ep=4 does not divide fsdp=2 x cp=1", "fsdp=2,ep=2"),
        ("tp=3", 32, 4, "tp=3 needs 3 ranks and there are 4", "tp=4"),
        ("dp=2,tp=3", 32, 8, "dp=2 x tp=3 needs 6 ranks and there are 8", "dp=2,tp=4"),
        ("tp=8", 32, 4, "tp=8 needs 8 ranks and there are 4", "tp=4"),
        ("pp=3,tp=2", 32, 8, "tp=2 x pp=3 needs 6 ranks and there are 8", "tp=2,pp=4"),
        ("dp=3,exact=8", 32, 3, "the 3 ranks of dp=3 x fsdp=1 are not a power of two", "dp=2,exact=8 on 2 ranks"),
        ("dp=8,fsdp=2,exact=8", 32, 16, "the 16 ranks of dp=8 x fsdp=2 are not", "dp=8,fsdp=2,exact=16"),
        ("dp=2,exact=8,micro_batch=4", 32, 2, "and so would micro_batch=4", "dp=2,exact=8"),
        ("dp=2,exact=64", 33, 2, "exact=64 virtual micro-batches are more than", "dp=2,exact=32"),
        ("tp=2,exact=8", 32, 2, "exact=8 is not offered with tp=2", "dp=2,exact=8|fsdp=2,exact=8"),
        ("fsdp=2,cp=2,exact=8", 32, 4, "exact=8 is not offered with cp=2", "dp=2,fsdp=2,exact=8|fsdp=4,exact=8"),
        ("pp=2,exact=8", 32, 2, "exact=8 is not offered with pp=2", "dp=2,exact=8|fsdp=2,exact=8"),
        ("fsdp=2,ep=2,exact=8", 32, 2, "exact=8 is not offered with ep=2", "fsdp=2,exact=8"),
        ("dp=2,exact=8,compile=blocks", 32, 2, "is not offered with compile=blocks", "dp=2,exact=8"),
        ("dp=2,exact=8,graphs=step", 32, 2, "graphs=step is not offered with exact=8", "dp=2,exact=8"),
        ("pp=2,graphs=step", 32, 2, "graphs=step is not offered with pp=2", "pp=2"),
        ("dp=2,recompute=host,graphs=step", 32, 2, "is not offered with recompute=host", "dp=2,recompute=host"),
        ("dp=2,offload=params,graphs=step", 32, 2, "is not offered with offload=params", "dp=2,offload=params"),
        ("dp=2,graphs=step,comm=int4", 32, 2, "is not offered with comm=int4", "dp=2,graphs=step"),
        ("fsdp=2,comm=onebit", 32, 2, "comm=onebit sums over replicas alone, and dp=1", "fsdp=2,comm=int4"),
        ("fsdp=2,ep=2,comm=topk:1", 32, 2, "sums over replicas alone", "fsdp=2,ep=2"),
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


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(("dp", "fsdp"), [(1, 1), (4, 1), (1, 4), (2, 4), (4, 2)])
def test_what_ranks_sum_together_is_a_node_of_one_tree(dp: int, fsdp: int, zero: int) -> None:
    layout = Layout(dp=dp, fsdp=fsdp, zero=zero, exact=16)
    every = [layout.leaves(rank) for rank in range(dp * fsdp)]
    assert sorted(leaf for leaves in every for leaf in leaves) == list(range(16))
    assert {len(leaves) for leaves in every} == {layout.micro_batches(33)}
    groups = [every[start : start + fsdp] for start in range(0, dp * fsdp, fsdp)]
    if zero > 1 and fsdp > 1:
        nodes = [list(together) for group in groups for together in zip(*group, strict=True)]
    else:
        nodes = every
    for node in [*nodes, *(sorted(leaf for leaves in group for leaf in leaves) for group in groups)]:
        assert node == list(range(node[0], node[0] + len(node)))
        assert node[0] % len(node) == 0


def test_how_much_is_offloaded_is_in_the_text() -> None:
    text = "offload=params,offload_percent=50"
    assert str(Layout.parse(text)) == text


def test_stages_of_a_pipeline() -> None:
    assert Layout(dp=4, schedule="interleaved").stages == 1
    assert Layout(pp=4).stages == 4
    assert Layout(pp=4, schedule="interleaved").stages == 8
