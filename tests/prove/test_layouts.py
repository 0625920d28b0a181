"""Which layouts stand for all."""

from __future__ import annotations

from itertools import combinations

from phalanx import Layout
from phalanx.layout import CHOICES
from phalanx.prove.layouts import as_proven, covering, each_choice, every


def test_all_are_valid_and_different() -> None:
    found = list(every(8, experts=True))
    assert len(found) == len(set(found)) == 652
    for layout in found:
        layout.check(17, 8)


def test_every_division_and_every_two_settings_are_covered() -> None:
    found = list(every(4))
    chosen = covering(found)
    assert len(chosen) < 0.6 * len(found)

    def degrees(layout: Layout) -> tuple[int, ...]:
        return layout.dp, layout.fsdp, layout.tp, layout.cp, layout.pp

    def pairs(layout: Layout) -> set[object]:
        own = {"zero": layout.zero, "schedule": layout.schedule, "cp_kind": layout.cp_kind, "tp": layout.tp}
        return set(combinations([i for i in own.items() if i[1] != getattr(Layout(), i[0])], 2))

    assert {degrees(layout) for layout in chosen} == {degrees(layout) for layout in found}
    assert set().union(*map(pairs, chosen)) == set().union(*map(pairs, found))
    assert covering(found, chosen) == []


def test_what_degrees_mean_by_default_is_among_them() -> None:
    for ranks in (2, 4, 8):
        found = list(every(ranks))
        chosen = covering(found)
        for layout in found:
            assert Layout(dp=layout.dp, fsdp=layout.fsdp, tp=layout.tp, cp=layout.cp, pp=layout.pp) in chosen
    met = {
        (layout.zero, layout.schedule) for layout in covering(list(every(4))) if layout.pp > 1 < layout.fsdp * layout.cp
    }
    assert met == {(zero, schedule) for zero in (1, 2, 3) for schedule in CHOICES["schedule"]}


def test_a_proof_has_several_micro_batches() -> None:
    for layout in every(4):
        assert as_proven(layout, 17).micro_batches(17) == 3
    assert as_proven(Layout(dp=8), 17).micro_batches(17) == 2
    assert as_proven(Layout(dp=2, exact=8), 17) == Layout(dp=2, exact=8)
    assert as_proven(Layout(dp=2, exact=64), 17) == Layout(dp=2, exact=16)


def test_what_needs_a_whole_step_has_one_micro_batch_in_a_pipeline() -> None:
    for layout in every(4):
        assert as_proven(layout, 17, at_once=True).micro_batches(17) == (1 if layout.pp > 1 else 3)
    assert as_proven(Layout(pp=2, micro_batch=8), 17, at_once=True).micro_batches(17) == 3, "as it says itself"


def test_every_method_that_may_be_chosen_is_proven() -> None:
    found = [str(layout) for layout in each_choice(Layout.parse("dp=2,comm=auto"))]
    assert found == ["dp=2", "dp=2,comm=bf16", "dp=2,comm=int8", "dp=2,comm=int4", "dp=2,comm=auto"]
    assert [str(layout) for layout in each_choice(Layout.parse("fsdp=2,comm=auto"))] == ["fsdp=2", "fsdp=2,comm=auto"]
    assert each_choice(Layout(dp=2)) == [Layout(dp=2)]
