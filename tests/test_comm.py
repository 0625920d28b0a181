from __future__ import annotations

import pytest

from phalanx.comm import Comm
from phalanx.errors import WrongUse
from phalanx.layout import Layout
from phalanx.layout_notes import layout_notes


def test_a_method_is_read() -> None:
    assert Comm.parse("exact") is None
    assert Comm.parse("int4") == Comm("int4", sharding=True, owes=True)
    assert Comm.parse("topk:0.5") == Comm("topk", sharding=False, owes=True, number=0.5)
    assert Comm.parse("int8") == Comm("int8", sharding=True, owes=False)
    assert Comm.parse("onebit") == Comm.parse("onebit:20") == Comm("onebit", sharding=False, owes=True, number=20)
    assert Comm.parse("powersgd:4") == Comm("powersgd", sharding=False, owes=True, number=4)


def test_some_begin_with_exact_steps() -> None:
    steps = {text: method.exact_steps(99) for text in METHODS if (method := Comm.parse(text))}
    assert steps == {"int4": 0, "topk:1": 0, "onebit": 20, "onebit:5": 5, "powersgd:4": 10}


METHODS = ("int4", "topk:1", "onebit", "onebit:5", "powersgd:4")


def test_an_unknown_one_is_refused_with_the_closest() -> None:
    with pytest.raises(
        WrongUse, match=r"comm=int9 is not known in a layout.*: exact, bf16, int8, int4, onebit:20, powersgd:4, topk:1"
    ):
        Layout.parse("dp=2,comm=int9")
    for text in ("topk", "topk:0", "topk:many", "topk:60"):
        with pytest.raises(WrongUse, match=f"comm={text}: the percent that are sent must be above 0"):
            Comm.parse(text)
    for text in ("powersgd", "powersgd:0", "powersgd:1.5", "powersgd:many"):
        with pytest.raises(WrongUse, match=f"comm={text}: the rank of its matrices must be a whole number"):
            Comm.parse(text)
    with pytest.raises(WrongUse, match="comm=onebit:0: the percent of steps that are exact must be above 0"):
        Comm.parse("onebit:0")
    with pytest.raises(WrongUse, match="comm=int8:3 is not known"):
        Comm.parse("int8:3")


def test_a_layout_says_over_which_axis() -> None:
    assert str(Layout.parse("fsdp=4,comm=int8")) == "fsdp=4,comm=int8"
    axes = {text: Layout.parse(text).coded_axis for text in ("dp=2", "dp=2,comm=int8", "fsdp=2,comm=int8")}
    assert axes == {"dp=2": "", "dp=2,comm=int8": "dp", "fsdp=2,comm=int8": "fsdp"}
    assert Layout.parse("dp=2,fsdp=2,comm=int8").coded_axis == "dp"
    assert not Layout.parse("tp=2,comm=int8").coded_axis
    (note,) = layout_notes(Layout.parse("dp=2,fsdp=2,comm=int8"), "cuda")
    assert note == "comm=int8 sums gradients over dp=2; what goes along fsdp=2 is as without it"
    (note,) = layout_notes(Layout.parse("dp=2,comm=auto"), "cuda")
    assert note == "comm=auto chooses how gradients travel over dp, by what is measured"
    (note,) = layout_notes(Layout.parse("fsdp=2,comm=auto"), "cuda")
    assert note.endswith("travel over fsdp, by what is measured; weights are gathered as they are")
    assert layout_notes(Layout.parse("tp=2,comm=int8"), "cuda") == [
        "comm=int8 has no effect at dp=1,fsdp=1: no gradients travel"
    ]


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        ("dp=2,exact=2,comm=int8", "exact=2 is not offered with comm=int8, which rounds what ranks send"),
        ("fsdp=2,comm=topk:1", "comm=topk:1 sums over replicas alone, and dp=1"),
        ("fsdp=2,comm=onebit", "comm=onebit sums over replicas alone, and dp=1"),
        ("fsdp=2,cp=2,comm=auto", "comm=auto over fsdp is not offered with cp=2"),
        ("dp=2,exact=2,comm=auto", "exact=2 is not offered with comm=auto, which rounds what ranks send"),
        ("fsdp=2,cp=2,comm=int8", "comm=int8 over fsdp is not offered with cp=2"),
        ("fsdp=2,ep=2,comm=int8", "comm=int8 over fsdp is not offered with ep=2"),
    ],
)
def test_what_cannot_be_is_refused(layout: str, why: str) -> None:
    found = Layout.parse(layout)
    with pytest.raises(WrongUse, match=f"{why}.* The nearest layout that works: "):
        found.check(8, found.world)
