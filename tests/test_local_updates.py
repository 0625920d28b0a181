from __future__ import annotations

import pytest

from phalanx.errors import WrongUse
from phalanx.layout import Layout
from phalanx.layout_notes import layout_notes
from phalanx.local_updates import LocalUpdates


@pytest.mark.parametrize(
    "text",
    ["local:4", "diloco:16", "diloco:16:int4:fragments=4:overlap=2:rate=1:momentum=0.3", "local:8:bf16"],
)
def test_the_text_form_is_read_and_written(text: str) -> None:
    found = LocalUpdates.parse(text)
    assert str(found) == text
    assert str(Layout.parse(f"dp=2,comm={text}")) == f"dp=2,comm={text}"


def test_others_are_not_meant() -> None:
    assert LocalUpdates.parse("exact") is LocalUpdates.parse("int4") is LocalUpdates.parse("topk:1") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("diloco", r"after how many steps sites agree, 1 or more\. Write e\.g\. diloco:16"),
        ("local:0", "after how many steps"),
        ("local:2.5", "after how many steps"),
        ("diloco:16:int9", "'int9', which is none of bf16, int8, int4"),
        ("diloco:16:int8:int4", "twice a codec"),
        ("diloco:16:parts=2", "'parts' is no part of comm=diloco:16:parts=2"),
        ("diloco:16:rate=fast", "rate=fast, which is no number"),
        ("diloco:4:fragments=5", "5 fragments in 4 steps"),
        ("diloco:16:fragments=4:overlap=4", r"the next leaves before that\. Write e\.g\. overlap=3"),
        ("diloco:4:fragments=4:overlap=2", r"Write e\.g\. diloco:12:fragments=4:overlap=2\."),
        ("diloco:1:overlap=-1", r"has -1 steps for a fragment to come back\. Write e\.g\. diloco:16:int4"),
        ("local:16:momentum=0.5", r"no rate or momentum\. Write e\.g\. diloco:16"),
        ("diloco:16:rate=3", "at most 2"),
        ("diloco:16:momentum=1", "below 1"),
    ],
)
def test_what_cannot_be_ends_in_what_to_write(text: str, words: str) -> None:
    with pytest.raises(WrongUse, match=words):
        Layout.parse(f"dp=2,comm={text}")


def test_an_option_that_is_no_more_is_read_and_said() -> None:
    before, now = LocalUpdates.parse("diloco:16:overlap=2:mix=0.25"), LocalUpdates.parse("diloco:16:overlap=2")
    assert before == now
    assert now is not None
    assert "mix is no more: what a site changes" in now.note("diloco:16:overlap=2:mix=0.25", 2)
    assert "no more" not in now.note(str(now), 2)
    with pytest.raises(WrongUse, match="mix=banana, which is no number"):
        LocalUpdates.parse("diloco:16:overlap=2:mix=banana")


def test_fragments_leave_and_arrive_in_turn() -> None:
    found = LocalUpdates.parse("diloco:16:fragments=4:overlap=2")
    assert found is not None
    assert {step: n for step in range(17, 33) if (n := found.arriving(step)) is not None} == {
        20: 0,
        24: 1,
        28: 2,
        32: 3,
    }
    assert {step: n for step in range(17, 33) if (n := found.leaving(step)) is not None} == {18: 0, 22: 1, 26: 2, 30: 3}
    assert [step for step in range(33) if found.is_boundary(step)] == [0, 16, 32]
    assert found.since(32) == range(17, 33)
    assert found.since(20) == range(17, 21)


def test_the_outer_optimizer() -> None:
    for text, outer in (
        ("diloco:64", (0.9, 0.2)),
        ("diloco:64:momentum=0.3", (0.9, 0.3)),
        ("diloco:16:rate=1:momentum=0.3", (1.0, 0.3)),
        ("local:16", (1.0, 0.0)),
    ):
        found = LocalUpdates.parse(text)
        assert found is not None
        assert found.outer == outer


def test_fragments_are_runs_of_about_the_same_size() -> None:
    found = LocalUpdates.parse("diloco:16:fragments=2")
    assert found is not None
    assert found.divided({"a": 1, "b": 8, "c": 1, "d": 6, "e": 2}) == {"a": 0, "b": 0, "c": 1, "d": 1, "e": 1}


def test_layouts_say_what_sites_are() -> None:
    layout = Layout.parse("dp=3,fsdp=2,comm=diloco:8:int8")
    assert layout.site == Layout(fsdp=2)
    assert Layout(dp=3).site == Layout(dp=3)
    assert not layout.coded_axis
    assert layout_notes(layout, "cuda") == [
        "comm=diloco:8:int8 has 3 sites train by themselves; they agree on all weights at once, every 8 steps. "
        "A step's loss and tokens are the first one's"
    ]
    with pytest.raises(WrongUse, match="dp=1 is one alone"):
        Layout.parse("fsdp=2,comm=local:2").check(8, 2)
    with pytest.raises(WrongUse, match="exact=2 is not offered with comm=local:2, which has sites train by themselves"):
        Layout.parse("dp=2,exact=2,comm=local:2").check(8, 2)


def test_a_site_stays_as_it_is_when_others_are_lost() -> None:
    layout = Layout.parse("dp=3,fsdp=2,comm=diloco:8")
    assert str(layout.fitted(24, 4)[0]) == "dp=2,fsdp=2,comm=diloco:8"
    assert str(layout.fitted(24, 2)[0]) == "fsdp=2"
    assert str(Layout.parse("dp=2,comm=int4").fitted(24, 4)[0]) == "dp=4,comm=int4"
    assert str(Layout.parse("fsdp=2,comm=int4").fitted(24, 4)[0]) == "fsdp=4,comm=int4"
    assert str(layout.fitted(24, 8)[0]) == "dp=4,fsdp=2,comm=diloco:8"
